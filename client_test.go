package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain lets the test binary run as the command `toad` in testdata/cli.
func TestMain(m *testing.M) {
	_, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM) // the process's signal loop must not begin in a bubble
	stop()
	testscript.Main(m, map[string]func(){"toad": hookedMain, "toad-powercut": guestMain})
}

func TestClientCommandLine(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata/cli", RequireExplicitExec: true})
}

const (
	cliID     = "01k9zxv3m5abcdefghjkmnpqrs"
	cliDigest = "sha256:1111111111111111111111111111111111111111111111111111111111111111"
	cliImage  = "registry.example.org/apps/hello@" + cliDigest
)

var cliTime = time.Date(2026, 11, 24, 9, 30, 0, 0, time.UTC)

// cliOp is an operation that went through these states, a second in each.
func cliOp(states ...string) wireOperation {
	last := states[len(states)-1]
	op := wireOperation{
		ID: cliID, Service: "hello", State: last, Generation: 8, ExpectedGeneration: 7,
		Terminal:    last == "promoted" || last == "rolled_back" || last == "failed",
		Candidate:   wireCandidate{Image: cliImage, Digest: cliDigest},
		Previous:    &wirePrevious{Generation: 7, Digest: "sha256:" + strings.Repeat("2", 64)},
		RequestedBy: "local", CreatedAt: wireTime(cliTime), UpdatedAt: wireTime(cliTime.Add(time.Minute)),
		RestartBudget: 1, StabilityWindowSeconds: 30,
	}
	for i, s := range states {
		op.Timeline = append(op.Timeline, wireTransition{State: s, At: wireTime(cliTime.Add(time.Duration(i) * time.Second))})
	}
	return op
}

func cliFailure(op wireOperation, f failure) wireOperation {
	op.Failure = &f
	return op
}

// cliWay is what successive looks at a rollout with that end find.
func cliWay(end wireOperation) []wireOperation {
	return []wireOperation{
		cliOp("preparing"),
		cliOp("preparing", "activating", "probation"), // the client was not there in time to see activating
		end,
	}
}

// fakeToad answers on a Unix socket as the server would. Each look at the operation finds the next
// of its steps, the last one for good.
type fakeToad struct {
	t      *testing.T
	socket string
	server *http.Server

	mu       sync.Mutex
	service  wireService
	steps    []wireOperation
	log      []wireLogLine
	events   []wireEvent
	requests []string // method, path and query
	posts    []string // bodies
	// intercept may take over the n-th request (from 1) with that method; nil or false: it is
	// answered as usual. It is called without the lock.
	intercept func(w http.ResponseWriter, method string, n int) bool
}

// quietService is a service of which there is little to tell.
func quietService() wireService {
	return wireService{Service: "hello", Generation: 7, Health: wireHealth{State: "unknown"}, Actions: []wireAction{}}
}

func newFakeToad(t *testing.T, steps ...wireOperation) *fakeToad {
	dir, err := os.MkdirTemp("", "toad") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	f := &fakeToad{t: t, socket: filepath.Join(dir, "toad.sock"), steps: steps}
	f.service = quietService()
	t.Cleanup(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.server.Close()
		os.RemoveAll(dir)
	})
	f.start()
	return f
}

func (f *fakeToad) start() {
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		f.t.Error(err)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.server = &http.Server{Handler: described(f.t, f)}
	go f.server.Serve(l)
}

// restart takes the server away with all of its connections, and another one comes.
func (f *fakeToad) restart() {
	f.mu.Lock()
	server := f.server
	f.mu.Unlock()
	server.Close()
	f.start()
}

func (f *fakeToad) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	f.requests = append(f.requests, r.Method+" "+r.URL.String())
	if r.Method == http.MethodPost {
		f.posts = append(f.posts, string(body))
	}
	n := 0
	for _, request := range f.requests {
		if strings.HasPrefix(request, r.Method) {
			n++
		}
	}
	f.mu.Unlock()
	if f.intercept != nil && f.intercept(w, r.Method, n) {
		return
	}

	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case r.URL.Path == "/v1/services/hello":
		cliAnswer(w, 200, f.service)
	case r.URL.Path == "/v1/services":
		cliAnswer(w, 200, wireServices{Services: []wireService{f.service}})
	case r.URL.Path == "/v1/services/hello/operations":
		cliAnswer(w, 200, wireOperations{Operations: append([]wireOperation{}, f.steps...), Next: cliID})
	case r.URL.Path == "/v1/operations/"+cliID+"/log":
		w.Header().Set("Content-Type", "application/x-ndjson")
		for _, l := range f.log {
			json.NewEncoder(w).Encode(l)
		}
	case r.URL.Path == "/v1/events":
		after, _ := strconv.ParseInt(r.FormValue("after"), 10, 64)
		page := wireEvents{Events: []wireEvent{}, NextCursor: after}
		for _, e := range f.events {
			if e.Cursor > after && len(page.Events) < 2 {
				page.Events, page.NextCursor = append(page.Events, e), e.Cursor
			}
		}
		cliAnswer(w, 200, page)
	case r.URL.Path == "/v1/operations/"+cliID+"/output":
		w.Header().Set("Content-Type", "application/octet-stream")
		io.WriteString(w, "\x1b[31mno database\nthe end")
	case r.Method == http.MethodPost && len(f.steps) > 0,
		r.URL.Path == "/v1/operations/"+cliID && len(f.steps) > 0:
		cliAnswer(w, 200, f.steps[0])
		if len(f.steps) > 1 {
			f.steps = f.steps[1:]
		}
	default:
		refuseWith(w, refuse("not_found", "there is no such thing"))
	}
}

func cliAnswer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	switch v := v.(type) {
	case problem:
		w.Header().Set("Content-Type", "application/problem+json")
	case wireOperation:
		w.Header().Set("Location", "/v1/operations/"+v.ID)
	}
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v)
}

// refuseWith answers with a refusal as the server does.
func refuseWith(w http.ResponseWriter, e *apiError) {
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(e.Status)
	json.NewEncoder(w).Encode(e.problem)
}

// cliDrop ends a request without an answer.
func cliDrop() { panic(http.ErrAbortHandler) }

// toad runs one command line against the fake.
func (f *fakeToad) toad(args ...string) (status int, stdout, stderr string) {
	f.t.Helper()
	var out, err bytes.Buffer
	status = run(f.t.Context(), append(args, "--socket", f.socket), &out, &err)
	return status, out.String(), err.String()
}

// requested and posted are what came so far: method, path and query, and the bodies of the posts.
func (f *fakeToad) requested() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.requests)
}

func (f *fakeToad) posted() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.posts)
}

func (f *fakeToad) seen(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, f.requested()); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

func wantParts(t *testing.T, what, s string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(s, part) {
			t.Errorf("%s has no %q:\n%s", what, part, s)
		}
	}
}

func TestClientDeployOutcomes(t *testing.T) {
	budget := failure{Code: "restart_budget", Summary: "the candidate restarted 2 times, the budget is 1", Hint: "see its output"}
	tests := []struct {
		name   string
		end    wireOperation
		status int
		want   string
	}{
		{"promoted", cliOp("preparing", "activating", "probation", "promoting", "promoted"), 0,
			"promoted: hello generation 8, sha256:111111111111\n"},
		{"rolled back", cliFailure(cliOp("preparing", "activating", "probation", "rolling_back", "rolled_back"), budget), exitRolledBack,
			"rolled back: hello is at generation 7 again, sha256:222222222222: restart_budget: the candidate restarted 2 times, the budget is 1\nhint: see its output\n"},
		{"failed", cliFailure(cliOp("preparing", "failed"), failure{Code: "fetch_failed", Summary: "no registry"}), exitFailed,
			"failed: hello generation 8, sha256:111111111111: fetch_failed: no registry\n"},
		{"rollback failed", cliFailure(cliOp("preparing", "activating", "probation", "rolling_back", "failed"),
			failure{Code: "rollback_failed", Summary: "generation 7 is not ready", Cause: "unit_failed"}), exitFailed,
			"failed: hello generation 8, sha256:111111111111: rollback_failed: generation 7 is not ready; cause: unit_failed\n"},
		{"cancelled", cliFailure(cliOp("preparing", "failed"), failure{Code: "requested", Summary: "ended by request of local"}), exitFailed,
			"cancelled: hello generation 8, sha256:111111111111: requested: ended by request of local\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFakeToad(t, cliWay(tt.end)...)
			status, stdout, stderr := f.toad("deploy", "hello", cliImage)
			if status != tt.status || stdout != tt.want {
				t.Errorf("status %d, want %d; stdout:\n%s\nwant:\n%s", status, tt.status, stdout, tt.want)
			}
			wantParts(t, "stderr", stderr, "--expect 7 --key ", "operation "+cliID,
				"preparing     fetching and checking sha256:111111111111\n",
				"2026-11-24 09:30:01Z  activating    stopping the running instance, starting the candidate\n",
				"probation     to be ready for 30s without a break, 1 restart allowed\n")
			for _, line := range tt.end.Timeline {
				if n := strings.Count(stderr, "  "+line.State+" "); n > 1 {
					t.Errorf("%s is told %d times:\n%s", line.State, n, stderr)
				}
			}
			f.seen(t, "GET /v1/services/hello", "POST /v1/deployments",
				"GET /v1/operations/"+cliID+"?wait=30&after_state=preparing",
				"GET /v1/operations/"+cliID+"?wait=1&after_state=probation")
			var req deployRequest
			if err := json.Unmarshal([]byte(f.posted()[0]), &req); err != nil {
				t.Fatal(err)
			}
			if req.Service != "hello" || req.Image != cliImage || *req.ExpectedGeneration != 7 || len(req.IdempotencyKey) < 20 {
				t.Errorf("request: %s", f.posted()[0])
			}

			// A later watch ends with the same words and status, and so does a repeated request that
			// finds the operation ended, whatever --no-wait says.
			if again, stdout, _ := f.toad("watch", cliID); again != tt.status || stdout != tt.want {
				t.Errorf("watch: status %d, stdout %s", again, stdout)
			}
			if again, stdout, _ := f.toad("deploy", "hello", cliImage, "--no-wait"); again != tt.status || stdout != tt.want {
				t.Errorf("deploy --no-wait of an ended operation: status %d, stdout %s", again, stdout)
			}
		})
	}
}

func TestClientDeployJSON(t *testing.T) {
	end := cliFailure(cliOp("preparing", "activating", "rolling_back", "rolled_back"), failure{Code: "start_failed", Summary: "s"})
	f := newFakeToad(t, cliWay(end)...)
	status, stdout, stderr := f.toad("deploy", "hello", cliImage, "--json")
	if status != exitRolledBack {
		t.Errorf("status %d", status)
	}
	var got wireOperation
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		t.Fatalf("standard output is not one document: %v\n%s", err, stdout)
	}
	want, _ := json.MarshalIndent(end, "", "  ")
	if diff := cmp.Diff(string(want)+"\n", stdout); diff != "" {
		t.Errorf("document (-want +got):\n%s", diff)
	}
	wantParts(t, "stderr", stderr, "rolled back: hello")
}

func TestClientDeployNoWait(t *testing.T) {
	f := newFakeToad(t, cliOp("preparing"))
	status, stdout, stderr := f.toad("deploy", "--expect=3", "hello", "--no-wait", cliImage, "--key", "ci-77")
	if status != 0 || stdout != cliID+"\n" {
		t.Errorf("status %d, stdout %q", status, stdout)
	}
	wantParts(t, "stderr", stderr, "to watch it: toad watch "+cliID+" --socket ")
	if strings.Contains(stderr, "to repeat") {
		t.Errorf("a key that was given is printed again:\n%s", stderr)
	}
	f.seen(t, "POST /v1/deployments")
	want := `{"service":"hello","image":"` + cliImage + `","expected_generation":3,"idempotency_key":"ci-77"}`
	if f.posted()[0] != want {
		t.Errorf("request %s, want %s", f.posted()[0], want)
	}
}

func TestClientDeployRefused(t *testing.T) {
	generation := int64(9)
	tests := []struct {
		problem problem
		want    []string
	}{
		{problem{Title: "stale generation", Status: 409, Code: "stale_generation", Detail: "hello is at generation 9", CurrentGeneration: &generation},
			[]string{"toad: deploying hello: hello is at generation 9 (stale_generation, current generation 9)\n", "hint: read the generation again: toad status hello"}},
		{problem{Title: "rollout active", Status: 409, Code: "rollout_active", Detail: "an operation is under way", OperationID: cliID, CurrentGeneration: &generation},
			[]string{"(rollout_active", "toad watch " + cliID}},
		{problem{Title: "invalid request", Status: 400, Code: "invalid_request", Detail: "image is missing", Field: "image"}, []string{"image is missing (field image) (invalid_request)"}},
		{problem{Title: "state unavailable", Status: 503, Code: "state_unavailable", Detail: "the records cannot be read"}, []string{"(state_unavailable)", "toad status hello"}},
	}
	for _, tt := range tests {
		t.Run(tt.problem.Code, func(t *testing.T) {
			f := newFakeToad(t)
			f.intercept = func(w http.ResponseWriter, method string, n int) bool {
				if method == http.MethodPost {
					cliAnswer(w, tt.problem.Status, tt.problem)
				}
				return method == http.MethodPost
			}
			status, stdout, stderr := f.toad("deploy", "hello", cliImage)
			if status != exitRefused || stdout != "" {
				t.Errorf("status %d, stdout %q", status, stdout)
			}
			wantParts(t, "stderr", stderr, tt.want...)

			status, stdout, _ = f.toad("deploy", "hello", cliImage, "--json")
			var got problem
			if err := json.Unmarshal([]byte(stdout), &got); err != nil || status != exitRefused {
				t.Errorf("status %d, %v: %s", status, err, stdout)
			}
			if diff := cmp.Diff(tt.problem, got); diff != "" {
				t.Errorf("problem (-want +got):\n%s", diff)
			}
			if len(f.posted()) != 2 {
				t.Errorf("a refused request was sent again: %q", f.requested())
			}
		})
	}
}

// A lost answer says nothing: the very same request goes again, also past a server that is not back
// yet, and the server knows its key.
func TestClientDeployAnswerLost(t *testing.T) {
	f := newFakeToad(t, cliWay(cliOp("preparing", "activating", "probation", "promoting", "promoted"))...)
	f.intercept = func(w http.ResponseWriter, method string, n int) bool {
		switch {
		case method == http.MethodPost && n == 1:
			cliDrop()
		case method == http.MethodPost && n == 2:
			cliAnswer(w, 503, problem{Title: "state unavailable", Status: 503, Code: "state_unavailable", Detail: "the records cannot be read"})
			return true
		}
		return false
	}
	status, _, stderr := f.toad("deploy", "hello", cliImage)
	if status != 0 {
		t.Errorf("status %d", status)
	}
	if p := f.posted(); len(p) != 3 || p[0] != p[1] || p[0] != p[2] || !strings.Contains(p[0], `"idempotency_key":"`) {
		t.Errorf("posts: %q", p)
	}
	wantParts(t, "stderr", stderr, "no answer: EOF; trying again for 2m0s\n", "connected again\n")
}

func TestClientFollowAcrossRestart(t *testing.T) {
	f := newFakeToad(t, cliWay(cliOp("preparing", "activating", "probation", "promoting", "promoted"))...)
	f.intercept = func(w http.ResponseWriter, method string, n int) bool {
		switch {
		case method == http.MethodGet && n == 2: // the first look after the acceptance
			f.restart()
			cliDrop()
		case method == http.MethodGet && n == 3: // it is there, and still reads its records
			cliAnswer(w, 503, problem{Title: "state unavailable", Status: 503, Code: "state_unavailable", Detail: "the records cannot be read"})
			return true
		case method == http.MethodGet && n == 4: // half an cliAnswer
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, `{"id":`)
			cliDrop()
		}
		return false
	}
	status, stdout, stderr := f.toad("deploy", "hello", cliImage)
	if status != 0 || len(f.posted()) != 1 {
		t.Errorf("status %d, posts %q", status, f.posted())
	}
	wantParts(t, "stdout", stdout, "promoted: hello generation 8")
	wantParts(t, "stderr", stderr, "trying again", "connected again")
}

func TestClientInterrupt(t *testing.T) {
	interrupt := func() { syscall.Kill(os.Getpid(), syscall.SIGINT) }
	tests := []struct {
		name   string
		args   []string
		method string
		n      int
		want   string
	}{
		{"while following", []string{"deploy", "hello", cliImage}, http.MethodGet, 2,
			"toad: stopped watching, the operation goes on\nhint: to watch it again: toad watch " + cliID},
		{"before the answer", []string{"deploy", "hello", cliImage, "--key", "k"}, http.MethodPost, 1,
			"it may have been accepted\nhint: to find out: toad deploy hello " + cliImage + " --expect 7 --key k"},
		{"while reading", []string{"status"}, http.MethodGet, 1, "toad: reading the services: interrupted\n"},
		{"in a log", []string{"log", cliID, "-f"}, http.MethodGet, 1, "interrupted\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFakeToad(t, cliOp("preparing"))
			gone := make(chan struct{})
			f.intercept = func(w http.ResponseWriter, method string, n int) bool {
				if method == tt.method && n == tt.n {
					interrupt()
					<-gone // no answer before the client has left
					cliDrop()
				}
				return false
			}
			status, stdout, stderr := f.toad(tt.args...)
			close(gone)
			if status != exitInterrupted || stdout != "" {
				t.Errorf("status %d, stdout %q", status, stdout)
			}
			wantParts(t, "stderr", stderr, tt.want)
			for _, r := range f.requested() {
				if strings.HasSuffix(r, "/rollback") {
					t.Errorf("Ctrl-C reached the operation: %s", r)
				}
			}
		})
	}
}

func TestClientOutOfReach(t *testing.T) {
	for _, args := range [][]string{
		{"status"}, {"deploy", "hello", cliImage}, {"deploy", "hello", cliImage, "--expect", "1"},
		{"watch", cliID}, {"rollback", cliID}, {"log", cliID}, {"log", "-f", cliID}, {"history", "hello"},
	} {
		var out, err bytes.Buffer
		status := run(t.Context(), append(args, "--socket", filepath.Join(t.TempDir(), "none")), &out, &err)
		if status != exitUnreachable || out.Len() > 0 {
			t.Errorf("%q: status %d, stdout %s", args, status, &out)
		}
		wantParts(t, fmt.Sprint(args), err.String(), "out of reach: dial unix", "hint: is the server running?")
	}
}

type cliTransport func(*http.Request) (*http.Response, error)

func (f cliTransport) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A server that does not come back is given up after two minutes, and how to go on is said.
func TestClientPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var stderr bytes.Buffer
		c := newClient(newFlags("test"), io.Discard, &stderr)
		c.socket = defaultSocket
		c.reached.Store(true)
		tries := 0
		c.http = &http.Client{Transport: cliTransport(func(*http.Request) (*http.Response, error) {
			tries++
			return nil, errors.New("gone")
		})}
		begun := time.Now()
		err := c.finish(t.Context(), nil, cliOp("preparing"), false, deployedStatus)
		var e *commandError
		if !errors.As(err, &e) || e.status != exitUnreachable || e.hint != "to watch it again: toad watch "+cliID {
			t.Errorf("%+v", err)
		}
		if took := time.Since(begun); took < patience || took > patience+10*time.Second {
			t.Errorf("gave up after %v", took)
		}
		if tries < 20 || tries > 40 {
			t.Errorf("%d tries", tries)
		}
		if n := strings.Count(stderr.String(), "trying again"); n != 1 {
			t.Errorf("said %d times:\n%s", n, &stderr)
		}
	})
}

// A server that answers at once whatever wait says is not asked in a tight loop.
func TestClientPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newClient(newFlags("test"), io.Discard, io.Discard)
		tries := 0
		c.http = &http.Client{Transport: cliTransport(func(*http.Request) (*http.Response, error) {
			op := cliOp("preparing", "activating", "probation")
			if tries++; tries > 40 {
				op = cliOp("preparing", "activating", "probation", "promoting", "promoted")
			}
			b, _ := json.Marshal(op)
			return &http.Response{StatusCode: 200, Body: io.NopCloser(bytes.NewReader(b))}, nil
		})}
		begun := time.Now()
		if err := c.finish(t.Context(), nil, cliOp("preparing", "activating", "probation"), false, deployedStatus); err != nil {
			t.Error(err)
		}
		if took := time.Since(begun); took != 40*pace {
			t.Errorf("40 looks in %v", took)
		}
	})
}

func TestClientRollback(t *testing.T) {
	promoted := cliOp("preparing", "activating", "probation", "promoting", "promoted")
	back := cliFailure(cliOp("preparing", "activating", "probation", "rolling_back", "rolled_back"), failure{Code: "requested", Summary: "ended by request of local"})
	cancelled := cliFailure(cliOp("preparing", "failed"), failure{Code: "requested", Summary: "ended by request of local"})
	removed := cliFailure(cliOp("preparing", "activating", "rolling_back", "failed"), failure{Code: "no_rollback_target", Summary: "it went wrong", Cause: "requested"})
	removedAnyway := cliFailure(cliOp("preparing", "activating", "rolling_back", "failed"), failure{Code: "no_rollback_target", Summary: "it went wrong", Cause: "unit_failed"})
	broken := cliFailure(cliOp("preparing", "activating", "rolling_back", "failed"), failure{Code: "rollback_failed", Summary: "it went wrong", Cause: "requested"})
	const (
		readService = "GET /v1/services/hello"
		endIt       = "POST /v1/operations/" + cliID + "/rollback"
		redeploy    = "POST /v1/services/hello/rollback"
	)
	tests := []struct {
		name   string
		active bool // an operation is under way
		args   []string
		end    wireOperation
		status int
		first  []string // requests before the following
	}{
		{"service, under way", true, []string{"hello"}, back, 0, []string{readService, endIt}},
		{"service, under way, cancelled", true, []string{"hello"}, cancelled, 0, []string{readService, endIt}},
		{"service, under way, first ever", true, []string{"hello"}, removed, 0, []string{readService, endIt}},
		{"service, under way, went wrong by itself", true, []string{"hello"}, removedAnyway, exitFailed, []string{readService, endIt}},
		{"service, under way, target broken", true, []string{"hello"}, broken, exitFailed, []string{readService, endIt}},
		{"service, retained revision", false, []string{"hello"}, promoted, 0, []string{readService, redeploy}},
		{"service, retained revision no good", false, []string{"hello"}, back, exitRolledBack, []string{readService, redeploy}},
		{"operation", true, []string{cliID}, back, 0, []string{endIt}},
		{"repeated by key", true, []string{"hello", "--key", "k"}, promoted, 0, []string{readService, redeploy}},
		{"repeated by key and generation", true, []string{"hello", "--key", "k", "--expect", "7"}, promoted, 0, []string{redeploy}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFakeToad(t, cliOp("preparing"), tt.end)
			if tt.active {
				op := cliOp("preparing")
				f.service.ActiveOperation = &op
			}
			status, _, stderr := f.toad(append([]string{"rollback"}, tt.args...)...)
			if status != tt.status {
				t.Errorf("status %d, want %d\n%s", status, tt.status, stderr)
			}
			f.seen(t, append(tt.first, "GET /v1/operations/"+cliID+"?wait=30&after_state=preparing")...)
			if body := f.posted()[0]; tt.first[len(tt.first)-1] == redeploy && !strings.HasPrefix(body, `{"expected_generation":7,"idempotency_key":"`) ||
				tt.first[len(tt.first)-1] == endIt && body != "" {
				t.Errorf("request: %s", body)
			}
		})
	}
}

// The operation may end before a lost answer is asked for again: what it was asked is what counts.
func TestClientRollbackAnswerLost(t *testing.T) {
	cancelled := cliFailure(cliOp("preparing", "failed"), failure{Code: "requested", Summary: "ended by request of local"})
	for _, requested := range []bool{true, false} {
		cancelled.RollbackRequested = requested
		f := newFakeToad(t, cancelled)
		f.intercept = func(w http.ResponseWriter, method string, n int) bool {
			if method == http.MethodPost && n == 1 {
				cliDrop()
			} else if method == http.MethodPost {
				cliAnswer(w, 409, problem{Title: "not rollbackable", Status: 409, Code: "not_rollbackable", Detail: "the operation has ended"})
				return true
			}
			return false
		}
		want := exitRefused
		if requested {
			want = 0
		}
		if status, _, stderr := f.toad("rollback", cliID); status != want {
			t.Errorf("requested %t: status %d\n%s", requested, status, stderr)
		}
	}
}

// A name of 26 characters that is no operation is a service's.
func TestClientRollbackAmbiguous(t *testing.T) {
	f := newFakeToad(t)
	status, _, _ := f.toad("rollback", strings.Repeat("a", 26))
	if status != exitRefused {
		t.Errorf("status %d", status)
	}
	f.seen(t, "POST /v1/operations/aaaaaaaaaaaaaaaaaaaaaaaaaa/rollback", "GET /v1/services/aaaaaaaaaaaaaaaaaaaaaaaaaa")
}

func cliService() wireService {
	at := wireTime(cliTime)
	last := cliFailure(cliOp("preparing", "activating", "rolling_back", "rolled_back"),
		failure{Code: "unit_failed", Summary: "the unit ended\x1b[2J", Hint: "see the output"})
	active := cliOp("preparing", "activating", "probation")
	active.ID = "01k9zxv3m5zzzzzzzzzzzzzzzz"
	return wireService{
		Service: "hello", Generation: 7, Installed: true,
		Current: &wireRevision{Generation: 7, Image: cliImage, Digest: cliDigest, PromotedAt: at},
		Rollback: &wireRollback{wireRevision: wireRevision{Generation: 5, Image: cliImage, Digest: cliDigest},
			Problems: []wireProblem{{"image_missing", "its image is gone"}}},
		ActiveOperation: &active, LastOperation: &last,
		Held:       &wireHeld{OperationID: cliID, Since: at, Remains: []string{"process 4711 of the unit"}},
		Enrollment: wireEnrollment{Problem: "hello.container: line 3: Image="},
		Health:     wireHealth{State: "running", ObservedAt: &at, Digest: cliDigest, RestartsSincePromotion: 1},
		Actions:    []wireAction{{Name: "deploy", Reason: "enrollment_invalid"}, {Name: "rollback_operation", Enabled: true}},
	}
}

func TestClientStatus(t *testing.T) {
	f := newFakeToad(t)
	f.service = cliService()
	status, stdout, _ := f.toad("status", "hello")
	want := `service     hello, generation 7
current     generation 7, promoted 2026-11-24 09:30:00Z
            ` + cliImage + `
health      running, not ready, 1 restart since promotion, seen 2026-11-24 09:30:00Z
            what runs is not the current revision: ` + cliDigest + `
rollback    generation 5, not ready
            ` + cliImage + `
            image_missing: its image is gone
operation   01k9zxv3m5zzzzzzzzzzzzzzzz: probation, generation 8, by local
            ` + cliImage + `
last        ` + cliID + `: rolled_back, generation 8, by local
            unit_failed: the unit ended[2J
            hint: see the output
held        since 2026-11-24 09:30:00Z, by operation ` + cliID + `
            still there: process 4711 of the unit
enrollment  invalid: hello.container: line 3: Image=
actions     deploy cannot be done: enrollment_invalid
            rollback_operation can be done
`
	if diff := cmp.Diff(want, stdout); diff != "" || status != 0 {
		t.Errorf("status %d (-want +got):\n%s", status, diff)
	}

	status, stdout, _ = f.toad("status")
	want = `SERVICE  GENERATION  DIGEST               STATE    READY  OPERATION                             ROLLBACK
hello    7           sha256:111111111111  running  no     probation 01k9zxv3m5zzzzzzzzzzzzzzzz  not ready
hello: enrollment invalid: hello.container: line 3: Image=
hello: held: still there: process 4711 of the unit
`
	if diff := cmp.Diff(want, stdout); diff != "" || status != 0 {
		t.Errorf("status %d (-want +got):\n%s", status, diff)
	}

	for _, args := range [][]string{{"status", "--json"}, {"status", "hello", "--json"}, {"history", "hello", "--json"}} {
		if status, stdout, stderr := f.toad(args...); status != 0 {
			t.Errorf("%q: status %d, %s%s", args, status, stdout, stderr)
		}
	}
	_, stdout, _ = f.toad("status", "hello", "--json")
	var got wireService
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || got.LastOperation.Failure.Summary != "the unit ended\x1b[2J" {
		t.Errorf("%v: %s", err, stdout)
	}

	f.service = wireService{Service: "hello", Enrollment: wireEnrollment{Valid: true, Repository: "registry.example.org/apps/hello"}, Health: wireHealth{State: "stopped"}, Actions: []wireAction{}}
	_, stdout, _ = f.toad("status", "hello")
	want = `service     hello, generation 0
current     none: nothing was promoted yet
health      stopped
rollback    none retained
enrollment  valid, registry.example.org/apps/hello
`
	if diff := cmp.Diff(want, stdout); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	f.service = wireService{Service: "hello", Problem: "service.json: checksum", Enrollment: wireEnrollment{Valid: true, Repository: "r"}, Health: wireHealth{State: "unknown"},
		Actions: []wireAction{{Name: "deploy", Reason: "state_unavailable"}}}
	_, stdout, _ = f.toad("status", "hello")
	want = `service     hello
problem     state unavailable: service.json: checksum
health      unknown
enrollment  valid, r
actions     deploy cannot be done: state_unavailable
`
	if diff := cmp.Diff(want, stdout); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	_, stdout, _ = f.toad("status")
	want = `SERVICE  GENERATION  DIGEST  STATE    READY  OPERATION  ROLLBACK
hello    -           -       unknown  no     -          -
hello: state unavailable: service.json: checksum
`
	if diff := cmp.Diff(want, stdout); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestClientHistory(t *testing.T) {
	f := newFakeToad(t, cliOp("preparing"),
		cliFailure(cliOp("preparing", "rolled_back"), failure{Code: "requested", Summary: "ended by request of local"}), cliOp("preparing", "promoted"))
	status, stdout, stderr := f.toad("history", "hello", "--limit", "3", "--before", cliID)
	want := `WHEN                  OPERATION                   GENERATION  DIGEST               WHO    OUTCOME               WHY
2026-11-24 09:30:00Z  ` + cliID + `  8           sha256:111111111111  local  under way: preparing  -
2026-11-24 09:30:00Z  ` + cliID + `  8           sha256:111111111111  local  rolled_back           requested: ended by request of local
2026-11-24 09:30:00Z  ` + cliID + `  8           sha256:111111111111  local  promoted              -
`
	if diff := cmp.Diff(want, stdout); diff != "" || status != 0 {
		t.Errorf("status %d (-want +got):\n%s", status, diff)
	}
	wantParts(t, "stderr", stderr, "older ones: toad history hello --limit 3 --before "+cliID)
	f.intercept = func(w http.ResponseWriter, _ string, _ int) bool {
		refuseWith(w, invalid("before", "before must be an operation's id"))
		return true
	}
	if status, _, stderr := f.toad("history", "hello", "--before", "x&y"); status != exitRefused {
		t.Errorf("status %d, %s", status, stderr)
	}
	f.seen(t, "GET /v1/services/hello/operations?before="+cliID+"&limit=3", "GET /v1/services/hello/operations?before=x%26y&limit=20")
}

func cliLog(n int) (lines []wireLogLine, text string) {
	for i := range n {
		at := cliTime.Add(time.Duration(i) * time.Second)
		lines = append(lines, wireLogLine{Seq: int64(i + 1), At: wireTime(at), State: "probation", Code: "not_ready", Text: fmt.Sprint("not ready: ", i)})
		text += fmt.Sprintf("2026-11-24 09:30:%02dZ  probation     not ready: %d\n", i, i)
	}
	return lines, text
}

func TestClientLog(t *testing.T) {
	f := newFakeToad(t, cliOp("preparing"))
	var want string
	f.log, want = cliLog(3)
	status, stdout, _ := f.toad("log", cliID)
	if diff := cmp.Diff(want, stdout); diff != "" || status != 0 {
		t.Errorf("status %d (-want +got):\n%s", status, diff)
	}
	status, stdout, _ = f.toad("log", cliID, "--json")
	var lines bytes.Buffer
	for _, l := range f.log {
		json.NewEncoder(&lines).Encode(l)
	}
	if diff := cmp.Diff(lines.String(), stdout); diff != "" || status != 0 {
		t.Errorf("status %d (-want +got):\n%s", status, diff)
	}
	if status, _, stderr := f.toad("log", strings.Repeat("z", 26)); status != exitRefused {
		t.Errorf("unknown operation: status %d, %s", status, stderr)
	}
}

// Each line is printed once, however often the stream breaks, and the end of the operation is the end.
func TestClientLogFollow(t *testing.T) {
	f := newFakeToad(t, cliOp("preparing"), cliOp("preparing", "activating"), cliOp("preparing", "promoted"))
	log, want := cliLog(6)
	f.log = log
	f.intercept = func(w http.ResponseWriter, method string, n int) bool {
		show := map[int]int{1: 2, 3: 4, 5: 5}[n] // the even ones look at the operation
		if show == 0 {
			return false
		}
		w.Header().Set("Content-Type", "application/x-ndjson")
		for _, l := range log[:show] {
			json.NewEncoder(w).Encode(l)
		}
		switch n {
		case 1: // in the middle of a line
			io.WriteString(w, `{"seq":3,"at"`)
			_ = http.NewResponseController(w).Flush()
			cliDrop()
		case 3: // the server stops and ends its streams as if all was told
		}
		return true
	}
	status, stdout, stderr := f.toad("log", "--follow", cliID)
	if diff := cmp.Diff(want, stdout); diff != "" || status != 0 {
		t.Errorf("status %d (-want +got):\n%s%s", status, diff, stderr)
	}
	if r := f.requested(); len(r) != 7 || strings.Contains(r[6], "follow") {
		t.Errorf("requests: %q", r)
	}
}

func cliEvents(n int) (events []wireEvent, text string) {
	for i := range n {
		e := wireEvent{Hash: strings.Repeat("0", 64), Cursor: int64(i + 1), At: wireTime(cliTime.Add(time.Duration(i) * time.Second)), Type: "refused", Actor: "local", Detail: "POST /v1/deployments: held"}
		line := fmt.Sprintf("%6d  2026-11-24 09:30:%02dZ  refused             local     -  POST /v1/deployments: held", i+1, i)
		if i == 2 {
			e.Count = 7
			line += " (7 times)"
		}
		events, text = append(events, e), text+line+"\n"
	}
	return events, text
}

func TestClientEvents(t *testing.T) {
	f := newFakeToad(t)
	var want string
	f.events, want = cliEvents(5)
	status, stdout, _ := f.toad("events", "hello")
	if diff := cmp.Diff(want, stdout); diff != "" || status != 0 {
		t.Errorf("status %d (-want +got):\n%s", status, diff)
	}
	f.seen(t, "GET /v1/events?after=0&service=hello", "GET /v1/events?after=2&service=hello", "GET /v1/events?after=4&service=hello", "GET /v1/events?after=5&service=hello")
	status, stdout, _ = f.toad("events", "--after", "3", "--json")
	var lines bytes.Buffer
	for _, e := range f.events[3:] {
		json.NewEncoder(&lines).Encode(e)
	}
	if diff := cmp.Diff(lines.String(), stdout); diff != "" || status != 0 {
		t.Errorf("status %d (-want +got):\n%s", status, diff)
	}
}

// Followed events are printed once each, over a restart of the server, until the operator stops.
func TestClientEventsFollow(t *testing.T) {
	f := newFakeToad(t)
	all, want := cliEvents(4)
	f.events = all[:2]
	ctx, cancel := context.WithCancel(t.Context())
	f.intercept = func(w http.ResponseWriter, method string, n int) bool {
		switch n {
		case 2:
			cliDrop()
		case 3:
			f.mu.Lock()
			f.events = all
			f.mu.Unlock()
		case 5:
			cancel()
			cliDrop()
		}
		return false
	}
	var out, err bytes.Buffer
	status := run(ctx, []string{"events", "hello", "--follow", "--socket", f.socket}, &out, &err)
	if diff := cmp.Diff(want, out.String()); diff != "" || status != exitInterrupted {
		t.Errorf("status %d (-want +got):\n%s%s", status, diff, &err)
	}
	if r := f.requested(); !strings.Contains(r[0], "wait=30") {
		t.Errorf("requests: %q", r)
	}
}

func TestClientOutput(t *testing.T) {
	f := newFakeToad(t)
	if status, stdout, _ := f.toad("output", cliID); status != 0 || stdout != "\x1b[31mno database\nthe end" {
		t.Errorf("status %d, %q", status, stdout)
	}
	status, stdout, _ := f.toad("output", cliID, "--json")
	var doc map[string]string
	if err := json.Unmarshal([]byte(stdout), &doc); err != nil || status != 0 || doc["output"] != "\x1b[31mno database\nthe end" || strings.Contains(stdout, "\x1b") {
		t.Errorf("status %d, %q", status, stdout)
	}
	var out bytes.Buffer // as on a terminal
	if printText(&out, []byte("\x1b[31mno\tdatabase\r\nthe \u202eend")); out.String() != "[31mno database\nthe end\n" {
		t.Errorf("%q", &out)
	}
	if status, _, stderr := f.toad("output", strings.Repeat("z", 26)); status != exitRefused {
		t.Errorf("unknown operation: status %d, %s", status, stderr)
	}
}

func TestClientPermute(t *testing.T) {
	root := newRoot(io.Discard, io.Discard)
	for line, want := range map[string]string{
		"":                                    "",
		"status":                              "status --",
		"deploy hello IMAGE --no-wait":        "deploy --no-wait -- hello IMAGE",
		"deploy hello --expect 7 IMAGE":       "deploy --expect 7 -- hello IMAGE",
		"deploy hello -key=K IMAGE -json":     "deploy -key=K -json -- hello IMAGE",
		"deploy --key --json hello":           "deploy --key --json -- hello",
		"deploy hello IMAGE --key":            "deploy --key",
		"deploy hello -- IMAGE --no-wait":     "deploy -- hello IMAGE --no-wait",
		"deploy hello --unknown x":            "deploy --unknown -- hello x",
		"log ID -f":                           "log -f -- ID",
		"--unknown deploy hello":              "--unknown deploy hello",
		"serve --plain-http a --plain-http b": "serve --plain-http a --plain-http b --",
	} {
		got := permute(root, strings.Fields(line))
		if !slices.Equal(got, strings.Fields(want)) {
			t.Errorf("%q: got %q, want %q", line, got, want)
		}
	}
}

func TestClientUsageErrors(t *testing.T) {
	for _, line := range []string{
		"", "frobnicate", "--frobnicate", "deploy", "deploy hello", "deploy hello a b", "deploy Hello a", "deploy ../x a",
		"deploy hello a --expect -1", "deploy hello a --expect x", "deploy hello a --key", "deploy hello a --frobnicate",
		"watch", "watch hello", "watch " + cliID + "0", "rollback", "rollback a_b", "rollback hello hello", "log", "log x",
		"history", "history hello --limit many", "status Hello", "status a b", "check",
		"events Hello", "events hello hello", "events --after x", "output", "output hello", "audit", "audit check", "audit verify Hello", "audit verify a b", "version now", "serve now",
	} {
		var out, err bytes.Buffer
		status := run(t.Context(), strings.Fields(line), &out, &err)
		if status != exitUsage || out.Len() > 0 {
			t.Errorf("%q: status %d, stdout %s", line, status, &out)
		}
		lines := strings.Split(err.String(), "\n")
		if len(lines) != 3 || !strings.HasPrefix(lines[0], "toad: ") || !strings.HasPrefix(lines[1], "hint: ") {
			t.Errorf("%q: %s", line, &err)
		}
	}
}

func TestClientEnvironment(t *testing.T) {
	f := newFakeToad(t, cliOp("preparing"))
	t.Setenv("TOAD_SOCKET", f.socket)
	t.Setenv("TOAD_NO_WAIT", "true")
	var out, err bytes.Buffer
	if status := run(t.Context(), []string{"deploy", "hello", cliImage}, &out, &err); status != 0 || out.String() != cliID+"\n" {
		t.Errorf("status %d: %s%s", status, &out, &err)
	}
	t.Setenv("TOAD_SOCKET", "/nowhere")
	if status, _, stderr := f.toad("status"); status != 0 {
		t.Errorf("a flag does not win over its variable: status %d, %s", status, stderr)
	}
	t.Setenv("TOAD_JSON", "perhaps")
	if status := run(t.Context(), []string{"status"}, io.Discard, &err); status != exitUsage {
		t.Errorf("status %d", status)
	}
}

// The defaults of serve are where the container's mounts are.
func TestClientServeFlags(t *testing.T) {
	for _, c := range newRoot(io.Discard, io.Discard).Subcommands {
		if c.Name != "serve" {
			continue
		}
		got := map[string]string{}
		c.FlagSet.VisitAll(func(f *flag.Flag) { got[f.Name] = f.DefValue })
		want := map[string]string{
			"bus": "unix:path=/run/toad/bus", "podman": "unix:///run/toad/podman/podman.sock", "quadlets": "/quadlet", "data": "/data",
			"enrollment": "/enrollment", "listen": ":8440", "web-listen": ":8441", "auth-file": "/etc/toad/auth.json", "ca-file": "/etc/toad/ca.pem", "plain-http": "",
			"reserved": "toad,toad-gateway,caddy,zot,luci,secrets", "watchdog": "0s",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		return
	}
	t.Error("no serve")
}

func TestClientProbationBar(t *testing.T) {
	op := cliOp("preparing", "activating", "probation")
	op.ReadyForSeconds, op.Restarts = 12.7, 1
	deadline := wireTime(cliTime.Add(102 * time.Second))
	op.DeadlineAt = &deadline
	over := op
	over.ReadyForSeconds = 31
	late := op
	late.ReadyForSeconds, late.DeadlineAt = 0, new(wireTime)
	none := op
	none.DeadlineAt, none.StabilityWindowSeconds, none.RestartBudget = nil, 0, 3
	tests := []struct {
		name  string
		op    wireOperation
		width int
		want  string
	}{
		{"wide", op, 200, "probation [################------------------------] 12s of 30s ready, 1 of 1 restarts, 1m42s left"},
		{"usual", op, 80, "probation [########-------------] 12s of 30s ready, 1 of 1 restarts, 1m42s left"},
		{"no room for a bar", op, 60, "probation 12s of 30s ready, 1 of 1 restarts, 1m42s left"},
		{"narrow", op, 20, "probation 12s of 30"},
		{"nothing", op, 1, ""},
		{"unknown", op, 0, ""},
		{"window over", over, 80, "probation [#####################] 31s of 30s ready, 1 of 1 restarts, 1m42s left"},
		{"deadline passed", late, 80, "probation [-------------------------] 0s of 30s ready, 1 of 1 restarts, 0s left"},
		{"no window, no deadline", none, 80, "probation [----------------------------------] 12s of 0s ready, 1 of 3 restarts"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := probationBar(tt.op, cliTime, tt.width); got != tt.want {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
		})
	}
	for width := range 200 {
		if n := len(probationBar(op, cliTime, width)); n > max(0, width-1) {
			t.Errorf("%d columns in a terminal of %d", n, width)
		}
	}
}

// On a terminal the bar is drawn over and gone before any other line.
func TestClientProgressLive(t *testing.T) {
	var b bytes.Buffer
	s := &screen{w: &b, live: true, width: func() int { return 40 }}
	p := progress{screen: s}
	op := cliOp("preparing", "activating", "probation")
	p.show(op, cliTime)
	p.show(op, cliTime)
	op.ReadyForSeconds = 2
	p.show(op, cliTime)
	op.ReadyForSeconds, op.Restarts = 0, 1
	p.show(op, cliTime)
	op = cliOp("preparing", "activating", "probation", "promoting", "promoted")
	op.Restarts = 1
	p.show(op, cliTime)
	s.clear()
	want := "2026-11-24 09:30:00Z  preparing     fetching and checking sha256:111111111111\n" +
		"2026-11-24 09:30:01Z  activating    stopping the running instance, starting the candidate\n" +
		"2026-11-24 09:30:02Z  probation     to be ready for 30s without a break, 1 restart allowed\n" +
		"\rprobation 0s of 30s ready, 0 of 1 resta\x1b[K" +
		"\rprobation 2s of 30s ready, 0 of 1 resta\x1b[K" +
		"\r\x1b[K2026-11-24 09:31:00Z  probation     1 restart, 1 allowed\n" +
		"\rprobation 0s of 30s ready, 1 of 1 resta\x1b[K" +
		"\r\x1b[K2026-11-24 09:30:03Z  promoting     looking once more, then committing\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestClientPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain, grün, 日本":           "plain, grün, 日本",
		"\x1b]0;title\x07a\x1b[2Jb": "]0;titlea[2Jb",
		"a\nb\tc\rd":                "a b c d",
		"c1 \u009b31m, bidi \u202e": "c1 31m, bidi ",
		"broken \xff":               "broken \uFFFD",
	} {
		if got := printable(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
	raw := "{\"a\": \"\\u001b x\u009b \u202e \U000e0041 grün\"}\n"
	got := escaped([]byte(raw))
	if want := `{"a": "\u001b x\u009b \u202e \udb40\udc41 grün"}` + "\n"; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
	var a, b map[string]string
	if json.Unmarshal([]byte(raw), &a) != nil || json.Unmarshal(got, &b) != nil || a["a"] != b["a"] {
		t.Errorf("another document: %q, %q", a, b)
	}
}

func TestClientRunInterruptedBefore(t *testing.T) {
	f := newFakeToad(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if status := run(ctx, []string{"status", "--socket", f.socket}, io.Discard, io.Discard); status != exitInterrupted {
		t.Errorf("status %d", status)
	}
}
