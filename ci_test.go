package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const ciToken = "toad_abcdefgh2345_6666666666666666666666666666666666666666666666666666666666666666"

// ciServer is Toad over TCP, and the registry, as the CI step sees them: it accepts as the real one does, and
// each look at the operation finds its next step, the last one for good. It also looks for the token where
// everybody on the machine could read it.
type ciServer struct {
	t    *testing.T
	addr string
	http *http.Server

	mu         sync.Mutex
	generation int64
	steps      []wireOperation
	keys       map[string]string // to the request as it was sent
	accepted   int
	revoked    bool
	refusal    *apiError // of every new submission
	// intercept may take over a request, or do something before it is answered. It is called without the lock.
	intercept func(w http.ResponseWriter, r *http.Request) bool
}

func newCIServer(t *testing.T, end wireOperation) *ciServer {
	s := &ciServer{t: t, generation: 7, steps: cliWay(end), keys: map[string]string{}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	s.addr = l.Addr().String()
	s.serve(l)
	t.Cleanup(s.cut)
	return s
}

func (s *ciServer) serve(l net.Listener) {
	server := &http.Server{Handler: described(s.t, s)}
	s.mu.Lock()
	s.http = server
	s.mu.Unlock()
	go server.Serve(l)
}

// cut takes the network away, and heal gives it back.
func (s *ciServer) cut() {
	s.mu.Lock()
	server := s.http
	s.mu.Unlock()
	server.Close()
}

func (s *ciServer) heal() {
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		s.t.Error(err)
		return
	}
	s.serve(l)
}

// on sets what takes over the requests from now on.
func (s *ciServer) on(intercept func(w http.ResponseWriter, r *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.intercept = intercept
}

func (s *ciServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		if b, _ := os.ReadFile(path); bytes.Contains(b, []byte(ciToken)) {
			s.t.Errorf("the token is in the arguments of a process: %q", b)
		}
	}
	s.mu.Lock()
	intercept := s.intercept
	s.mu.Unlock()
	if intercept == nil || !intercept(w, r) {
		s.answer(w, r)
	}
}

func (s *ciServer) answer(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.revoked || r.Header.Get("Authorization") != "Bearer "+ciToken {
		refuseWith(w, &apiError{problem: problem{Title: "unauthorized", Status: 401, Code: "unauthorized", Detail: "a valid token is needed"}})
		return
	}
	op := s.steps[0]
	switch {
	case r.URL.Path == "/v1/services/hello":
		v := quietService()
		v.Generation = s.generation
		cliAnswer(w, 200, v)
	case r.Method == http.MethodPost:
		var req deployRequest
		var body bytes.Buffer
		body.ReadFrom(r.Body)
		must(s.t, json.Unmarshal(body.Bytes(), &req))
		known, ok := s.keys[req.IdempotencyKey]
		w.Header().Set("Location", "/v1/operations/"+cliID)
		switch {
		case ok && known == body.String():
			cliAnswer(w, 200, op)
		case ok:
			refuseWith(w, keyReused(cliID).(*apiError))
		case s.refusal != nil:
			refuseWith(w, s.refusal)
		case *req.ExpectedGeneration != s.generation:
			e := refuse("stale_generation", "expected_generation is not the current generation")
			e.CurrentGeneration = &s.generation
			refuseWith(w, e)
		default:
			s.keys[req.IdempotencyKey] = body.String()
			s.accepted++
			for i := range s.steps {
				s.steps[i].Candidate = wireCandidate{req.Image, digestOf(req.Image)}
			}
			cliAnswer(w, 202, s.steps[0])
		}
	case r.URL.Path == "/v1/operations/"+cliID:
		cliAnswer(w, 200, op)
		if len(s.steps) > 1 {
			s.steps = s.steps[1:]
			if s.steps[0].State == "promoted" {
				s.generation = s.steps[0].Generation
			}
		}
	case r.URL.Path == "/v1/operations/"+cliID+"/log" && r.Header.Get("Accept") == "text/plain":
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Write([]byte("the log of the operation\n"))
	default:
		refuseWith(w, refuse("not_found", "there is no such thing for this token"))
	}
}

// step is the CI step, about to run under a shell.
func (s *ciServer) step(shell []string, env ...string) (*exec.Cmd, *bytes.Buffer) {
	args := append(shell[1:len(shell):len(shell)], "infra/ci-deploy.sh")
	cmd := exec.Command(shell[0], args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "TOAD_SERVER=http://" + s.addr, "TOAD_TOKEN=" + ciToken, "TOAD_SERVICE=hello",
		"TOAD_IMAGE=" + cliImage, "TOAD_RUN=1234", "TOAD_PATIENCE=20"}, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	return cmd, &out
}

// run runs it to its end, which must be with that exit status and those words.
func (s *ciServer) run(shell []string, status int, words string, env ...string) {
	s.t.Helper()
	cmd, out := s.step(shell, env...)
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		s.t.Fatal(err)
	}
	if got := cmd.ProcessState.ExitCode(); got != status || !strings.Contains(out.String(), words) {
		s.t.Errorf("exit %d, want %d and %q:\n%s", got, status, words, out)
	}
	if strings.Contains(out.String(), ciToken) || strings.Contains(out.String(), "secret-of-the-registry") {
		s.t.Errorf("a secret was printed:\n%s", out)
	}
}

// inEachShell runs a test under the shells that CI images have.
func inEachShell(t *testing.T, f func(t *testing.T, shell []string)) {
	for _, shell := range [][]string{{"dash"}, {"busybox", "sh"}} {
		t.Run(shell[0], func(t *testing.T) {
			t.Parallel()
			for _, tool := range []string{shell[0], "curl", "jq"} {
				if _, err := exec.LookPath(tool); err != nil {
					t.Fatalf("%v: testdata/test installs it", err)
				}
			}
			f(t, shell)
		})
	}
}

func ciEnd(state string) wireOperation {
	switch state {
	case "promoted":
		return cliOp("preparing", "activating", "probation", "promoting", "promoted")
	case "rolled_back":
		return cliFailure(cliOp("preparing", "activating", "probation", "rolling_back", "rolled_back"), failure{Code: "restart_budget", Summary: "the candidate restarted 2 times"})
	}
	return cliFailure(cliOp("preparing", "failed"), failure{Code: "fetch_failed", Summary: "it could not be fetched", Hint: "deploy again"})
}

func TestCIStepOutcomes(t *testing.T) {
	inEachShell(t, func(t *testing.T, shell []string) {
		for _, tt := range []struct {
			state  string
			status int
			words  string
		}{
			{"promoted", 0, "toad: promoted: hello is at generation 8"},
			{"rolled_back", 4, "toad: rolled back: restart_budget: the candidate restarted 2 times"},
			{"failed", 3, "toad: failed: fetch_failed: it could not be fetched (deploy again)"},
		} {
			s := newCIServer(t, ciEnd(tt.state))
			s.run(shell, tt.status, tt.words)
			s.run(shell, tt.status, "the log of the operation") // a retried step
			if s.accepted != 1 {
				t.Errorf("%s: %d deployments", tt.state, s.accepted)
			}
		}
	})
}

func TestCIStepRefusals(t *testing.T) {
	inEachShell(t, func(t *testing.T, shell []string) {
		s := newCIServer(t, ciEnd("promoted"))
		e := refuse("rollout_active", "operation %s is under way", cliID)
		e.CurrentGeneration, e.OperationID = &s.generation, cliID
		s.refusal = e
		s.run(shell, 7, "toad: busy: operation "+cliID+" is under way")
		stale := refuse("stale_generation", "expected_generation is 7, the current generation is 9")
		stale.CurrentGeneration = &s.generation
		s.refusal = stale
		s.run(shell, 6, "toad: stale generation: somebody else deployed: expected_generation is 7")
		s.refusal = refuse("repository_not_allowed", "not from there")
		s.run(shell, 1, "refused with status 422: repository_not_allowed: not from there")
		s.run(shell, 8, "the token is not valid", "TOAD_TOKEN=toad_other")
		s.run(shell, 1, "refused with status 404: not_found", "TOAD_SERVICE=other")
		for words, env := range map[string]string{
			"TOAD_TOKEN is not set": "TOAD_TOKEN=", "TOAD_TOKEN is not a token": "TOAD_TOKEN=x\" --output /tmp/x", "TOAD_SERVICE is not set": "TOAD_SERVICE=",
			"not a service": "TOAD_SERVICE=../hello", "TOAD_IMAGE is not set": "TOAD_IMAGE=", "neither a tag nor a digest": "TOAD_IMAGE=registry.example.org:5000/apps/hello",
			"not a digest: sha256:12": "TOAD_DIGEST=sha256:12", "not a digest: md5:12": "TOAD_DIGEST=md5:12", "TOAD_RUN is not set": "TOAD_RUN=", "other characters": "TOAD_RUN=a b",
			"not a number": "TOAD_PATIENCE=long", "holds no digest": "TOAD_DIGEST_FILE=/nowhere",
		} {
			more := []string{env}
			if strings.HasPrefix(env, "TOAD_DIGEST_FILE") {
				more = append(more, "TOAD_IMAGE=registry.example.org/apps/hello")
			}
			s.run(shell, 2, words, more...)
		}
		if s.accepted != 0 {
			t.Errorf("%d deployments", s.accepted)
		}
		// What was refused was not accepted: the step may be run again.
		s.refusal = nil
		s.run(shell, 0, "promoted")
		// The run is through with this service, whatever it built since.
		s.run(shell, 1, "run 1234 deployed "+cliImage+" with operation "+cliID+" already", "TOAD_IMAGE="+strings.ReplaceAll(cliImage, "1", "9"))
		if s.accepted != 1 {
			t.Errorf("%d deployments", s.accepted)
		}
	})
}

// TestCIStepFindsTheDigest: the published digest comes from the registry, from a file, or as it is.
func TestCIStepFindsTheDigest(t *testing.T) {
	inEachShell(t, func(t *testing.T, shell []string) {
		file := filepath.Join(t.TempDir(), "digest")
		must(t, os.WriteFile(file, []byte(cliDigest), 0o600))
		registry := http.NewServeMux()
		registry.HandleFunc("HEAD /v2/apps/hello/manifests/{tag}", func(w http.ResponseWriter, r *http.Request) {
			user, password, _ := r.BasicAuth()
			accept := strings.Join(r.Header.Values("Accept"), ",")
			switch {
			case user != "ci" || password != "secret-of-the-registry":
				w.WriteHeader(401)
			case r.PathValue("tag") != "v1":
				w.WriteHeader(404)
			case strings.Contains(accept, "application/vnd.oci.image.manifest.v1+json") && strings.Contains(accept, "application/vnd.docker.distribution.manifest.v2+json"):
				w.Header().Set("Docker-Content-Digest", cliDigest)
			}
		})
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		server := &http.Server{Handler: registry}
		go server.Serve(l)
		defer server.Close()
		at := []string{"REGISTRY_URL=http://" + l.Addr().String(), "REGISTRY_USER=ci", "REGISTRY_PASSWORD=secret-of-the-registry"}
		for _, env := range [][]string{
			append([]string{"TOAD_IMAGE=registry.example.org/apps/hello:v1"}, at...),
			{"TOAD_IMAGE=registry.example.org/apps/hello", "TOAD_DIGEST=" + cliDigest},
			{"TOAD_IMAGE=registry.example.org/apps/hello:v2", "TOAD_DIGEST_FILE=" + file},
		} {
			s := newCIServer(t, ciEnd("promoted"))
			s.run(shell, 0, "toad: deploying "+cliImage+" to hello", env...)
		}
		s := newCIServer(t, ciEnd("promoted"))
		s.run(shell, 1, "the registry answered with status 404", append([]string{"TOAD_IMAGE=registry.example.org/apps/hello:v3"}, at...)...)
		s.run(shell, 1, "the registry answered with status 401", "TOAD_IMAGE=registry.example.org/apps/hello:v1", at[0])
		if s.accepted != 0 {
			t.Errorf("%d deployments", s.accepted)
		}
	})
}

// TestCIStepLosesTheNetwork: the answer to the submission is lost, and later the whole server.
func TestCIStepLosesTheNetwork(t *testing.T) {
	inEachShell(t, func(t *testing.T, shell []string) {
		s := newCIServer(t, ciEnd("promoted"))
		posts, looks := 0, 0
		s.on(func(w http.ResponseWriter, r *http.Request) bool {
			switch {
			case r.Method == http.MethodPost:
				if posts++; posts == 1 {
					s.answer(httptest.NewRecorder(), r) // it is accepted
					cliDrop()
				}
			case strings.HasPrefix(r.URL.Path, "/v1/operations/"):
				if looks++; looks == 1 {
					s.cut()
					time.AfterFunc(1500*time.Millisecond, s.heal) // curl is another process: it tells nobody that it has seen this
					cliDrop()
				}
			}
			return false
		})
		s.run(shell, 0, "no answer yet (status 000), trying again")
		if s.accepted != 1 || posts != 2 || looks < 2 {
			t.Errorf("%d deployments of %d requests, %d looks", s.accepted, posts, looks)
		}
		s.cut()
		s.run(shell, 5, "run this step again to go on", "TOAD_PATIENCE=1")
	})
}

// TestCIStepWaitsForAServerThatIsNotReady: "not now" is no refusal.
func TestCIStepWaitsForAServerThatIsNotReady(t *testing.T) {
	inEachShell(t, func(t *testing.T, shell []string) {
		s := newCIServer(t, ciEnd("promoted"))
		asked := 0
		s.on(func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPost {
				return false
			}
			if asked++; asked > 1 {
				return false
			}
			refuseWith(w, refuse("shutting_down", "toad is shutting down; try again"))
			return true
		})
		s.run(shell, 0, "no answer yet (status 503), trying again")
	})
}

func TestCIStepTokenRevokedMeanwhile(t *testing.T) { // E10
	inEachShell(t, func(t *testing.T, shell []string) {
		s := newCIServer(t, ciEnd("promoted"))
		looks := 0
		s.on(func(w http.ResponseWriter, r *http.Request) bool {
			if strings.HasPrefix(r.URL.Path, "/v1/operations/") {
				looks++
				s.mu.Lock()
				s.revoked = looks > 1
				s.mu.Unlock()
			}
			return false
		})
		s.run(shell, 8, "the token is not valid: it was revoked or has expired; operation "+cliID+" goes on without us")
	})
}

// TestCIStepKilledAndRunAgain: the step is killed, with all that it started, while the operation is under
// way, and run again before and after that ended.
func TestCIStepKilledAndRunAgain(t *testing.T) {
	inEachShell(t, func(t *testing.T, shell []string) {
		for _, when := range []string{"under way", "ended"} {
			s := newCIServer(t, ciEnd("promoted"))
			reached, killed := make(chan struct{}), make(chan struct{})
			s.on(func(w http.ResponseWriter, r *http.Request) bool {
				if strings.HasPrefix(r.URL.Path, "/v1/operations/") {
					select {
					case <-killed:
					default:
						close(reached)
						<-killed
						cliDrop()
					}
				}
				return false
			})
			cmd, out := s.step(shell)
			must(t, cmd.Start())
			select {
			case <-reached:
			case <-time.After(30 * time.Second):
				t.Errorf("it never looked at its operation")
			}
			must(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL))
			close(killed)
			if cmd.Wait() == nil {
				t.Errorf("it was not killed:\n%s", out)
			}
			if when == "ended" {
				s.mu.Lock()
				s.steps, s.generation = s.steps[len(s.steps)-1:], 8
				s.mu.Unlock()
			}
			s.run(shell, 0, "toad: promoted: hello is at generation 8")
			if s.accepted != 1 {
				t.Errorf("%s: %d deployments", when, s.accepted)
			}
		}
	})
}
