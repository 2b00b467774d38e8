// Exchanges a key for a cookie, which scripts cannot read; the key is kept nowhere.
import { logIn } from "./api.js";

const field = document.getElementById("key");
const problem = document.getElementById("problem");

document.getElementById("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.textContent = "";
  try {
    await logIn(field.value.trim());
    location.replace(`/${location.hash}`);
  } catch (error) {
    problem.textContent = error.status ? error.message : "The coordinator does not answer.";
    field.focus();
  } finally {
    field.value = "";
  }
});
