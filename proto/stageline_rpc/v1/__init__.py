"""Version 1 of the contract. Everything here but this file comes from the .proto files (`make proto`)."""
