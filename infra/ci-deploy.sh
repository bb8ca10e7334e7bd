#!/bin/sh
# ci-deploy.sh: the step of a CI run that has Toad deploy what the run published,
# and follows it to the end. It needs a POSIX sh, curl and jq.
#
#   TOAD_SERVER       where Toad is reached, http://127.0.0.1:8440 if unset
#   TOAD_TOKEN        a token of the service with the verbs read and deploy
#   TOAD_SERVICE      the service
#   TOAD_IMAGE        REPOSITORY:TAG, whose digest the registry is asked for, or
#                     REPOSITORY@DIGEST, or REPOSITORY with one of the next two
#   TOAD_DIGEST       the published digest
#   TOAD_DIGEST_FILE  a file that holds it (--digestfile of podman and skopeo)
#   TOAD_RUN          names the run, and stays the same when a step of it is tried
#                     again; if unset, what GitHub, Gitea, GitLab or Woodpecker say
#   TOAD_PATIENCE     give up when nobody has answered for so many seconds (600)
#   REGISTRY_URL      https://HOST of the repository if unset
#   REGISTRY_USER, REGISTRY_PASSWORD   for a registry that asks for them
#
# A run deploys to a service at most once: its name is the idempotency key. A step
# that was killed, or lost the network, and is run again finds what it began and
# goes on following it. What is done with an image is Toad's to decide.
#
# Exit status:
#   0 promoted            3 failed        5 nobody answered       8 the token is not
#   1 refused             4 rolled back   6 stale generation        valid (any more)
#   2 not rightly called                  7 another rollout is under way
{ set +x; } 2>/dev/null # the token is in no trace
set -eu

die() {
  result=$1
  shift
  printf 'toad: %s\n' "$*" >&2
  exit "$result"
}

token=${TOAD_TOKEN-}
password=${REGISTRY_PASSWORD-}
unset TOAD_TOKEN REGISTRY_PASSWORD # what is run from here has no use for them
server=${TOAD_SERVER:-http://127.0.0.1:8440}
server=${server%/}
service=${TOAD_SERVICE-}
image=${TOAD_IMAGE-}
run=${TOAD_RUN:-${GITHUB_RUN_ID:-${CI_PIPELINE_ID:-${CI_PIPELINE_NUMBER-}}}}
patience=${TOAD_PATIENCE:-600}
newline='
'

[ -n "$token" ] || die 2 "TOAD_TOKEN is not set"
case $token in *[!A-Za-z0-9_]*) die 2 "TOAD_TOKEN is not a token" ;; esac
[ -n "$service" ] || die 2 "TOAD_SERVICE is not set"
case $service in *[!a-z0-9-]*) die 2 "TOAD_SERVICE is not a service: $service" ;; esac
[ -n "$image" ] || die 2 "TOAD_IMAGE is not set"
[ -n "$run" ] || die 2 "TOAD_RUN is not set, and no CI that names its runs is known here"
key=ci-$run
case $key in *[!A-Za-z0-9._:-]*) die 2 "TOAD_RUN has other characters than A-Z a-z 0-9 . _ : -" ;; esac
[ "${#key}" -le 128 ] || die 2 "TOAD_RUN is longer than 125 characters"
case $patience in '' | *[!0-9]*) die 2 "TOAD_PATIENCE is not a number of seconds" ;; esac

# ask CONFIG URL ARGUMENT...: one request, tried again while nobody answers or the
# answer is "not now". CONFIG is curl's, and gets to it by no argument, which others
# could read. Sets status and answer.
ask() {
  config=$1
  url=$2
  shift 2
  begun=$(date +%s)
  pause=1
  while :; do
    status=000
    if out=$(printf '%s\n' "$config" | curl --disable --config - --silent --show-error --globoff \
      --connect-timeout 10 --max-time 45 --write-out '\n%{http_code}' "$@" --url "$url"); then
      status=${out##*"$newline"}
      answer=${out%"$newline"*}
    fi
    case $status in
    000 | 429 | 500 | 502 | 503 | 504) ;;
    *) return 0 ;;
    esac
    [ "$(($(date +%s) - begun))" -lt "$patience" ] ||
      die 5 "no answer from $url for $patience s (last status $status); run this step again to go on"
    printf 'toad: no answer yet (status %s), trying again\n' "$status" >&2
    sleep "$pause"
    [ "$pause" -ge 8 ] || pause=$((pause * 2))
  done
}

# toad PATH ARGUMENT...: one request to Toad. A status from 300 on is a problem.
toad() {
  path=$1
  shift
  ask "header = \"Authorization: Bearer $token\"" "$server$path" "$@"
}

# member FILTER: of the answer, empty if it is not there.
member() { printf '%s' "$answer" | jq -r "$1 | values" 2>/dev/null || :; }

# refused: says what the problem is, and ends.
refused() {
  code=$(member .code)
  detail=$(member .detail)
  case $status:$code in
  401:*) die 8 "the token is not valid: it was revoked or has expired${id:+; operation $id goes on without us}" ;;
  409:stale_generation) die 6 "stale generation: somebody else deployed: $detail" ;;
  409:rollout_active) die 7 "busy: $detail" ;;
  *) die 1 "refused with status $status: ${code:-no answer of Toad}: $detail" ;;
  esac
}

# digest_of HOST NAME TAG: what the registry has under that tag.
digest_of() {
  config=
  if [ -n "${REGISTRY_USER-}" ]; then
    case $REGISTRY_USER$password in *[\"\\]* | *"$newline"*) die 2 "REGISTRY_USER or REGISTRY_PASSWORD has a quote, a backslash or a line break" ;; esac
    config="user = \"$REGISTRY_USER:$password\""
  fi
  registry=${REGISTRY_URL:-https://$1}
  ask "$config" "${registry%/}/v2/$2/manifests/$3" --head \
    --header 'Accept: application/vnd.oci.image.manifest.v1+json' \
    --header 'Accept: application/vnd.docker.distribution.manifest.v2+json' \
    --header 'Accept: application/vnd.oci.image.index.v1+json' \
    --header 'Accept: application/vnd.docker.distribution.manifest.list.v2+json'
  [ "$status" = 200 ] || die 1 "the registry answered with status $status for $image"
  digest=$(printf '%s\n' "$answer" | tr -d '\r' | tr '[:upper:]' '[:lower:]' | sed -n 's/^docker-content-digest: *//p')
  [ -n "$digest" ] || die 1 "the registry does not tell the digest of $image: give it as TOAD_DIGEST"
}

id=
digest=${TOAD_DIGEST-}
if [ -z "$digest" ] && [ -n "${TOAD_DIGEST_FILE-}" ]; then
  read -r digest <"$TOAD_DIGEST_FILE" || [ -n "$digest" ] || die 2 "$TOAD_DIGEST_FILE holds no digest"
fi
repository=${image%@*}
tag=
case ${repository##*/} in *:*) tag=${repository##*:} repository=${repository%:*} ;; esac
case $image in *@*) digest=${digest:-${image##*@}} ;; esac
if [ -z "$digest" ]; then
  [ -n "$tag" ] || die 2 "TOAD_IMAGE has neither a tag nor a digest: $image"
  digest_of "${repository%%/*}" "${repository#*/}" "$tag"
fi
case $digest in sha256:*[!0-9a-f]* | [!s]*) die 2 "not a digest: $digest" ;; esac
[ "${#digest}" = 71 ] || die 2 "not a digest: $digest"
image=$repository@$digest

toad "/v1/services/$service"
[ "$status" = 200 ] || refused
generation=$(member .generation)
printf 'toad: deploying %s to %s, which is at generation %s, as %s\n' "$image" "$service" "$generation" "$key" >&2

# The same request is sent until there is an answer: it is accepted at most once.
toad /v1/deployments --header 'Content-Type: application/json' --data-binary "$(
  jq -cn --arg service "$service" --arg image "$image" --arg key "$key" --argjson generation "$generation" \
    '{service: $service, image: $image, expected_generation: $generation, idempotency_key: $key}'
)"
case $status in
200 | 202) id=$(member .id) ;;
422)
  # An earlier try of this step was accepted, at the generation that it had read.
  [ "$(member .code)" = key_reused ] || refused
  id=$(member .operation_id)
  toad "/v1/operations/$id"
  [ "$status" = 200 ] || refused
  [ "$(member .candidate.image)" = "$image" ] ||
    die 1 "run $run deployed $(member .candidate.image) with operation $id already: a run deploys once"
  ;;
*) refused ;;
esac
printf 'toad: operation %s\n' "$id" >&2

state=
while :; do
  now=$(member .state)
  [ -n "$now" ] || die 1 "this is no answer of Toad: $answer"
  if [ "$now" != "$state" ]; then
    state=$now
    printf 'toad: %s\n' "$state" >&2
  else
    sleep 1 # a server that is ending answers at once
  fi
  [ "$(member .terminal)" != true ] || break
  toad "/v1/operations/$id?wait=25&after_state=$state"
  [ "$status" = 200 ] || refused
done
generation=$(member .generation)
failure=$(member '.failure | values | "\(.code): \(.summary)" + if .hint then " (\(.hint))" else "" end')

toad "/v1/operations/$id/log" --header 'Accept: text/plain'
[ "$status" != 200 ] || printf '%s\n' "$answer"
case $state in
promoted) printf 'toad: promoted: %s is at generation %s, %s\n' "$service" "$generation" "$digest" >&2 ;;
rolled_back) die 4 "rolled back: $failure" ;;
*) die 3 "failed: $failure" ;;
esac
