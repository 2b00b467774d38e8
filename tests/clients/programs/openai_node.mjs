// Checks of the `openai` package for Node: node openai_node.mjs URL FACTS.json
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [url, file] = process.argv.slice(2);
const { model, cases } = JSON.parse(readFileSync(file, "utf8"));
const client = new OpenAI({ baseURL: `${url}v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story." }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 8 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];

const create = (testCase, more) =>
  (testCase.is_chat ? client.chat.completions : client.completions).create({ model, ...testCase.body, ...more });

const logprobsOf = (choice) =>
  choice.logprobs?.content?.map((entry) => entry.logprob) ?? choice.logprobs?.token_logprobs ?? [];

function sameNumbers(found, expected) {
  assert.equal(found.length, expected.length);
  found.forEach((value, index) => {
    const other = expected[index];
    assert.ok(value === other || Math.abs(value - other) < 1e-6 * Math.max(1, Math.abs(other)), `${value} ${other}`);
  });
}

async function equalsGrpc(testCase) {
  const body = await create(testCase);
  assert.equal(body.choices.length, testCase.expected.length);
  body.choices.forEach((choice, index) => {
    const expected = testCase.expected[index];
    assert.equal(testCase.is_chat ? choice.message.content : choice.text, expected.text);
    assert.deepEqual(choice.token_ids, expected.token_ids);
    assert.equal(choice.finish_reason, expected.finish_reason);
    if (expected.logprobs.length) sameNumbers(logprobsOf(choice), expected.logprobs);
  });
  assert.equal(body.usage.completion_tokens, testCase.completion_tokens);
}

async function streamEqualsGrpc(testCase) {
  const found = testCase.expected.map(() => ({ text: "", token_ids: [], logprobs: [] }));
  let usage = null;
  for await (const chunk of await create(testCase, { stream: true, stream_options: { include_usage: true } })) {
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      const output = found[choice.index];
      output.text += (testCase.is_chat ? choice.delta.content : choice.text) ?? "";
      output.token_ids.push(...(choice.token_ids ?? []));
      output.logprobs.push(...logprobsOf(choice));
      output.finish_reason = choice.finish_reason ?? output.finish_reason;
    }
  }
  testCase.expected.forEach((expected, index) => {
    const { logprobs, ...output } = found[index];
    const { logprobs: expectedLogprobs, ...rest } = expected;
    assert.deepEqual(output, rest);
    if (expectedLogprobs.length) sameNumbers(logprobs, expectedLogprobs);
  });
  assert.equal(usage.completion_tokens, testCase.completion_tokens);
}

const checks = {
  async models() {
    const found = [];
    for await (const entry of client.models.list()) found.push(entry.id);
    assert.deepEqual(found, [model]);
  },
  async errors() {
    const calls = [
      [{ model: "other", prompt: "a" }, OpenAI.NotFoundError, { code: "model_not_found" }],
      [{ model, prompt: "a", temperature: 200 }, OpenAI.BadRequestError, { param: "temperature" }],
      [{ model, prompt: "a", max_tokens: 1e6 }, OpenAI.BadRequestError, { code: "context_length_exceeded" }],
    ];
    for (const [body, kind, expected] of calls) {
      await assert.rejects(client.completions.create(body), (error) => {
        assert.ok(error instanceof kind, error);
        for (const [name, value] of Object.entries(expected)) assert.equal(error[name], value);
        return true;
      });
    }
  },
  async rawResponse() {
    const { data, response, request_id } = await client.completions
      .create({ model, prompt: "a", max_tokens: 4, colour: "red" })
      .withResponse();
    assert.equal(response.headers.get("x-stageline-ignored"), "colour");
    assert.equal(data.id, `cmpl-${request_id}`);
  },
  async forcedTool() {
    const body = { model, messages, tools, tool_choice: "required", parallel_tool_calls: false, temperature: 0, max_tokens: 200 };
    const whole = (await client.chat.completions.create(body)).choices[0];
    const streamed = (await client.chat.completions.stream(body).finalChatCompletion()).choices[0];
    for (const choice of [whole, streamed]) {
      assert.equal(choice.finish_reason, "tool_calls");
      const call = choice.message.tool_calls[0];
      assert.equal(call.function.name, "weather");
      assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
    }
    assert.equal(streamed.message.tool_calls[0].function.arguments, whole.message.tool_calls[0].function.arguments);
  },
  async parsedSchema() {
    const schema = { type: "object", properties: { tame: { type: "boolean" } }, required: ["tame"], additionalProperties: false };
    const body = await client.chat.completions.parse({
      model, messages, temperature: 0, max_tokens: 120,
      response_format: { type: "json_schema", json_schema: { name: "animal", strict: true, schema } },
    });
    assert.equal(typeof JSON.parse(body.choices[0].message.content).tame, "boolean");
  },
  async abortedStream() {
    const stream = await client.completions.create({ model, prompt: "a", max_tokens: 1000, stream: true, ignore_eos: true });
    for await (const _ of stream) break;
    assert.ok(stream.controller.signal.aborted);
  },
};

let failed = false;
async function run(name, check) {
  try {
    await check();
    console.log(`passed: ${name}`);
  } catch (error) {
    failed = true;
    console.log(`FAILED: ${name}\n${error.stack}`);
  }
}

for (const testCase of cases) {
  await run(`${testCase.name}, whole`, () => equalsGrpc(testCase));
  await run(`${testCase.name}, streamed`, () => streamEqualsGrpc(testCase));
}
for (const [name, check] of Object.entries(checks)) await run(name, check);
process.exit(failed ? 1 : 0);
