#!/usr/bin/env bash
# Conure from the shell, with curl only. Start a server first: conure serve
set -euo pipefail

URL="${CONURE_URL:-http://127.0.0.1:8400}"

# Send one request. An error of the server is printed and stops the script.
call() {
  local method="$1" path="$2" body="${3:-}"
  local args=(--silent --show-error --fail-with-body --max-time 120 -X "$method" "$URL$path")
  if [ -n "$body" ]; then
    args+=(-H "Content-Type: application/json" -d "$body")
  fi
  curl "${args[@]}"
}

# Print the string values of a field in a JSON reply, one per line.
field() {
  grep -o "\"$1\" *: *\"[^\"]*\"" | sed 's/^[^:]*: *"\(.*\)"$/\1/'
}

say() {
  printf '\n== %s\n' "$1"
}

say "models"
call GET /v1/models
echo

say "submit a program: two calls, the second reads the output of the first"
accepted="$(call POST /v1/programs '{
  "program": {
    "name": "find-and-write",
    "variables": {"report": {"type": "string"}},
    "nodes": [
      {"id": "find", "op": "generate",
       "messages": [{"role": "user",
                     "content": [{"input": "report"}, {"text": "\n\nWho was the guard?"}]}],
       "output": {"variable": "guard", "max_tokens": 32, "temperature": 0}},
      {"id": "write", "op": "generate",
       "messages": [{"role": "user", "content": [
         {"text": "Ask "}, {"input": "guard"}, {"text": " to come to Kolvar."}]}],
       "output": {"variable": "letter", "max_tokens": 32, "temperature": 0}}],
    "outputs": ["letter"]},
  "inputs": {"report": "The guard was Tessa Brook. It happened in Kolvar."}}')"
echo "$accepted"
id="$(field id <<< "$accepted" | head -n 1)"

say "wait for a value (long poll)"
call GET "/v1/programs/$id/variables/letter?wait_s=60"
echo

say "events, from the first to the last"
call GET "/v1/programs/$id/events?after=0"

say "status and receipt"
status="$(call GET "/v1/programs/$id")"
if command -v python3 > /dev/null; then
  python3 -m json.tool <<< "$status"
else
  echo "$status"
fi

say "Parrot's API: submit a prompt, set its input, get its output"
submitted="$(call POST /v1/submit '{
  "prompt": "{{input:report}}\n\nWho was the guard? {{output:guard}}",
  "placeholders": [
    {"name": "report", "in_out": false},
    {"name": "guard", "in_out": true, "max_tokens": 32, "temperature": 0}]}')"
echo "$submitted"
session="$(field session_id <<< "$submitted" | head -n 1)"
report="$(field semantic_var_id <<< "$submitted" | sed -n 1p)"
guard="$(field semantic_var_id <<< "$submitted" | sed -n 2p)"
call POST /v1/set "{\"semantic_var_id\": \"$report\", \"content\": \"The driver was Pavel Orlin. The guard was Tessa Brook.\"}"
echo
call POST /v1/get "{\"semantic_var_id\": \"$guard\", \"criteria\": \"latency\"}"
echo
call DELETE "/v1/programs/$session" > /dev/null

say "OpenAI's API: a chat completion"
call POST /v1/chat/completions '{
  "model": "default", "max_tokens": 32, "temperature": 0,
  "messages": [{"role": "user", "content": "Repeat this sentence: The road was closed."}]}'
echo
