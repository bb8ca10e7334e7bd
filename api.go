// api.go is HTTP: the routes, requests and answers, errors, and waiting. Wire types and records are
// different structs on purpose: a private field of a record cannot leak by being added.
package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"net/http"
	"net/url"
	"path"
	"reflect"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Durations go over the wire in seconds, times as RFC 3339 UTC with milliseconds.
type wireTime time.Time

const wireTimeForm = "2006-01-02T15:04:05.000Z"

func (t wireTime) MarshalJSON() ([]byte, error) {
	return []byte(`"` + time.Time(t).UTC().Format(wireTimeForm) + `"`), nil
}

func (t *wireTime) UnmarshalJSON(b []byte) error {
	u, err := time.Parse(`"`+time.RFC3339Nano+`"`, string(b))
	*t = wireTime(u)
	return err
}

type deployRequest struct {
	Service            string `json:"service"`
	Image              string `json:"image"`
	ExpectedGeneration *int64 `json:"expected_generation"`
	IdempotencyKey     string `json:"idempotency_key"`
}

type rollbackRequest struct {
	ExpectedGeneration *int64 `json:"expected_generation"`
	IdempotencyKey     string `json:"idempotency_key"`
}

type reconcileRequest struct {
	OperationID string `json:"operation_id"`
}

type retireRequest struct {
	Generation *int64 `json:"generation"`
}

type wireRevision struct {
	Generation int64    `json:"generation"`
	Image      string   `json:"image"`
	Digest     string   `json:"digest"`
	PromotedAt wireTime `json:"promoted_at"`
}

type wireCandidate struct {
	Image  string `json:"image"`
	Digest string `json:"digest"`
}

type wirePrevious struct {
	Generation int64  `json:"generation"`
	Digest     string `json:"digest"`
}

type wireTransition struct {
	State string   `json:"state"`
	At    wireTime `json:"at"`
}

type wireOperation struct {
	ID                     string           `json:"id"`
	Service                string           `json:"service"`
	State                  string           `json:"state"`
	Terminal               bool             `json:"terminal"`
	Generation             int64            `json:"generation"`
	ExpectedGeneration     int64            `json:"expected_generation"`
	Candidate              wireCandidate    `json:"candidate"`
	Previous               *wirePrevious    `json:"previous"`
	RequestedBy            string           `json:"requested_by"`
	CreatedAt              wireTime         `json:"created_at"`
	UpdatedAt              wireTime         `json:"updated_at"`
	FinishedAt             *wireTime        `json:"finished_at"`
	DeadlineAt             *wireTime        `json:"deadline_at"`
	Timeline               []wireTransition `json:"timeline"`
	Restarts               int              `json:"restarts"`
	RestartBudget          int              `json:"restart_budget"`
	ReadyForSeconds        float64          `json:"ready_for_seconds"`
	StabilityWindowSeconds float64          `json:"stability_window_seconds"`
	RollbackRequested      bool             `json:"rollback_requested"`
	Failure                *failure         `json:"failure"`
}

type wireProblem struct {
	Code    string `json:"code"`
	Summary string `json:"summary"`
}

type wireRollback struct {
	wireRevision
	Ready    bool          `json:"ready"`
	Problems []wireProblem `json:"problems"`
}

type wireHealth struct {
	State                  string    `json:"state"` // running, starting, stopped, failed, held, foreign, unknown
	Ready                  bool      `json:"ready"`
	ObservedAt             *wireTime `json:"observed_at"`
	Digest                 string    `json:"digest,omitempty"`
	MatchesCurrent         bool      `json:"matches_current"`
	RestartsSincePromotion int       `json:"restarts_since_promotion"`
}

type wireAction struct {
	Name    string `json:"name"`
	Enabled bool   `json:"enabled"`
	Reason  string `json:"reason,omitempty"` // an error code
}

type wireSuspended struct {
	Since   wireTime `json:"since"`
	By      string   `json:"by"`
	Remains []string `json:"remains"` // what is still there, in public words
}

type wireBarrier struct {
	OperationID string   `json:"operation_id"`
	RaisedAt    wireTime `json:"raised_at"`
}

type wireRetired struct {
	Since   wireTime `json:"since"`
	By      string   `json:"by"`
	Done    bool     `json:"done"`    // its instance, its unit and its images are gone
	Remains []string `json:"remains"` // what is still there, in public words
}

type wireHeld struct {
	OperationID string   `json:"operation_id"`
	Since       wireTime `json:"since"`
	Remains     []string `json:"remains"` // what is still there, in public words
}

// wireEnrollment is what of an enrollment anyone may read.
type wireEnrollment struct {
	Valid                  bool    `json:"valid"`
	Problem                string  `json:"problem,omitempty"` // local answers only
	Unit                   string  `json:"unit,omitempty"`
	Repository             string  `json:"repository,omitempty"`
	ReadinessScheme        string  `json:"readiness_scheme,omitempty"`
	ReadinessPort          int     `json:"readiness_port,omitempty"`
	ReadinessPath          string  `json:"readiness_path,omitempty"`
	IntervalSeconds        float64 `json:"interval_seconds,omitempty"`
	TimeoutSeconds         float64 `json:"timeout_seconds,omitempty"`
	RolloutDeadlineSeconds float64 `json:"rollout_deadline_seconds,omitempty"`
	StartupDeadlineSeconds float64 `json:"startup_deadline_seconds,omitempty"`
	StabilityWindowSeconds float64 `json:"stability_window_seconds,omitempty"`
	RestartBudget          int     `json:"restart_budget"`
	FetchDeadlineSeconds   float64 `json:"fetch_deadline_seconds,omitempty"`
	StopDeadlineSeconds    float64 `json:"stop_deadline_seconds,omitempty"`
	Barrier                bool    `json:"barrier"`              // an operation that goes wrong closes the service
	DiffersFromCurrent     bool    `json:"differs_from_current"` // the next deployment runs under another enrollment than the current revision
}

type wireService struct {
	Service         string         `json:"service"`
	Generation      int64          `json:"generation"`
	Current         *wireRevision  `json:"current"`
	Rollback        *wireRollback  `json:"rollback"`
	ActiveOperation *wireOperation `json:"active_operation"`
	LastOperation   *wireOperation `json:"last_operation"`
	Barrier         *wireBarrier   `json:"barrier"`
	Suspended       *wireSuspended `json:"suspended"`
	Held            *wireHeld      `json:"held"`
	Retired         *wireRetired   `json:"retired"`
	Installed       bool           `json:"installed"`
	Enrollment      wireEnrollment `json:"enrollment"`
	Health          wireHealth     `json:"health"`
	Actions         []wireAction   `json:"actions"`
	Problem         string         `json:"problem,omitempty"` // why its state is unavailable; local answers only
}

type wireServices struct {
	Services []wireService `json:"services"`
}

type wireOperations struct {
	Operations []wireOperation `json:"operations"`
	Next       string          `json:"next,omitempty"` // pass as before= for older ones
}

type wireLogLine struct {
	Seq   int64    `json:"seq"`
	At    wireTime `json:"at"`
	State string   `json:"state"`
	Code  string   `json:"code"`
	Text  string   `json:"text"`
}

type wireVersion struct {
	Version string `json:"version"`
	Go      string `json:"go"`
}

type wireHealthz struct {
	Status   string         `json:"status"` // ok, or degraded when a service's state is unavailable
	Services map[string]int `json:"services"`
}

// problem is an application/problem+json answer (RFC 9457) with the members that its code calls for.
type problem struct {
	Title             string `json:"title"`
	Status            int    `json:"status"`
	Code              string `json:"code"`
	Detail            string `json:"detail,omitempty"`
	Field             string `json:"field,omitempty"`
	Verb              string `json:"verb,omitempty"`
	CurrentGeneration *int64 `json:"current_generation,omitempty"`
	OperationID       string `json:"operation_id,omitempty"`
}

// apiError is a refusal: what the client is told, and nothing else of why.
type apiError struct {
	problem
	err   error         // for the journal
	local string        // what the administration socket is told besides
	retry time.Duration // when to come again
}

func (e *apiError) Error() string { return e.Code + ": " + e.Detail }
func (e *apiError) Unwrap() error { return e.err }

// because adds what the journal is told.
func (e *apiError) because(err error) *apiError {
	e.err = err
	return e
}

// statuses maps each code to its HTTP status.
var statuses = map[string]int{
	"invalid_request": 400, "unauthorized": 401, "forbidden": 403, "not_found": 404, "too_many_requests": 429,
	"stale_generation": 409, "rollout_active": 409, "held": 409, "not_rollbackable": 409,
	"rollback_barrier": 409, "suspended": 409, "no_revision": 409, "enrolled": 409,
	"key_reused": 422, "repository_not_allowed": 422, "enrollment_invalid": 422,
	"state_unavailable": 503, "shutting_down": 503, "internal": 500,
}

func refuse(code, format string, args ...any) *apiError {
	return &apiError{problem: problem{Code: code, Status: statuses[code], Title: strings.ReplaceAll(code, "_", " "), Detail: fmt.Sprintf(format, args...)}}
}

func invalid(field, format string, args ...any) *apiError {
	e := refuse("invalid_request", format, args...)
	e.Field = field
	return e
}

func tooMany(retry time.Duration, format string, args ...any) *apiError {
	e := refuse("too_many_requests", format, args...)
	e.retry = retry
	return e
}

// What a request and its answer may take.
const (
	maxBody   = 16 << 10
	bodyTime  = 10 * time.Second // for the body to arrive
	writeTime = 30 * time.Second // for what was written to be taken
)

// maxWait bounds a long poll.
const maxWait = 60 * time.Second

// route is one thing that may be asked for.
type route struct {
	pattern string
	unix    bool   // it is there on the administration socket
	verb    string // that a token needs for it over TCP; "": it is not there
	serve   func(w http.ResponseWriter, r *http.Request) error
	params  []string // of its query
}

func (d *daemon) routes() []route {
	return []route{
		{"POST /v1/deployments", true, "deploy", d.postDeployment, []string{"dry_run"}},
		{"GET /v1/operations/{id}", true, "read", d.getOperation, []string{"wait", "after_state"}},
		{"GET /v1/operations/{id}/log", true, "read", d.getLog, []string{"follow"}},
		{"GET /v1/operations/{id}/output", true, "", d.getOutput, nil},
		{"POST /v1/operations/{id}/rollback", true, "rollback", d.postOperationRollback, nil},
		{"GET /v1/services", true, "read", d.getServices, nil},
		{"GET /v1/services/{service}", true, "read", d.getService, nil},
		{"GET /v1/services/{service}/operations", true, "read", d.getOperations, []string{"limit", "before"}},
		{"POST /v1/services/{service}/rollback", true, "rollback", d.postServiceRollback, nil},
		{"POST /v1/services/{service}/reconcile", true, "deploy", d.postReconcile, nil},
		{"POST /v1/services/{service}/suspend", true, "", d.postSuspend, nil},
		{"POST /v1/services/{service}/resume", true, "", d.postResume, nil},
		{"POST /v1/services/{service}/retire", true, "", d.postRetire, nil},
		{"POST /v1/rollback", false, "rollback", d.postServiceRollback, nil},
		{"GET /v1/events", true, "read", d.getEvents, []string{"service", "after", "wait"}},
		{"GET /v1/version", true, "read", getVersion, nil},
		{"GET /v1/health", true, "read", d.getHealth, nil},
		{"GET /v1/openapi.json", true, "read", getDescription, nil},
		{"POST /v1/tokens", true, "", d.postToken, nil},
		{"GET /v1/tokens", true, "", d.getTokens, []string{"service"}},
		{"DELETE /v1/tokens/{id}", true, "", d.deleteToken, nil},
		{"GET /metrics", true, "", d.getMetrics, nil},
		{"GET /v1/audit", true, "", d.getAudit, []string{"service"}},
		{"POST /v1/fsck", true, "", d.postFsck, nil},
		{"GET /v1/backup", true, "", d.getBackup, nil},
	}
}

// handler serves the administration socket: everything, for whoever the file system lets in.
func (d *daemon) handler() http.Handler {
	mux := d.mux(func(rt route) bool { return rt.unix })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.answer(mux, newReply(w, r), r)
	})
}

// tcpHandler serves the holders of tokens: each for one service, and as if there were no other.
func (d *daemon) tcpHandler() http.Handler {
	mux := d.mux(func(rt route) bool { return rt.verb != "" })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t, c := d.tokens.holder(r.Header), caller{remote: true}
		if t != nil {
			c.token, c.service, c.verbs = t.ID, t.service, t.Verbs
		}
		if len(d.conns) > cap(d.conns)/2 { // who keeps connections and asks nothing must not keep them from others
			w.Header().Set("Connection", "close")
		}
		ctx, end := context.WithCancel(context.WithValue(r.Context(), callerKey{}, c))
		defer end()
		out := newReply(w, r)
		now := d.host.wall()
		if t == nil || !t.valid(now) {
			d.writeError(out, r.WithContext(ctx), unauthorized())
			return
		}
		select {
		case t.slots <- struct{}{}:
			defer func() { <-t.slots }()
		default:
			d.writeError(out, r.WithContext(ctx), tooMany(time.Second, "this token has %d requests under way", tokenRequests))
			return
		}
		t.used.Store(now.UnixMilli())
		defer context.AfterFunc(t.ended, end)()
		if t.ExpiresAt != nil {
			defer time.AfterFunc(t.ExpiresAt.Sub(now), end).Stop()
		}
		r = r.WithContext(ctx)
		out.ended = func() bool { return !t.valid(d.host.wall()) }
		out.refuse = func() { d.writeError(&reply{ResponseWriter: w}, r, unauthorized()) }
		d.answer(mux, out, r)
		if !out.wrote && out.ended() {
			out.WriteHeader(http.StatusOK)
		}
	})
}

// reply is an answer on its way: a client that does not take it is let go, and once its token has ended
// nothing more of it is told.
type reply struct {
	http.ResponseWriter
	ended  func() bool // nil on the administration socket
	refuse func()
	wrote  bool
	over   bool
}

// newReply bounds what the client may take for the body of its request and for the answer.
func newReply(w http.ResponseWriter, r *http.Request) *reply {
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(writeTime))
	if r.ContentLength != 0 {
		_ = rc.SetReadDeadline(time.Now().Add(bodyTime))
	}
	return &reply{ResponseWriter: w}
}

func (w *reply) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *reply) WriteHeader(status int) {
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(writeTime))
	switch {
	case w.over:
	case !w.wrote && w.ended != nil && w.ended():
		w.wrote, w.over = true, true
		clear(w.Header())
		w.refuse()
	default:
		w.wrote = true
		w.ResponseWriter.WriteHeader(status)
	}
}

func (w *reply) Write(b []byte) (int, error) {
	if !w.wrote {
		w.WriteHeader(http.StatusOK)
	}
	if w.over = w.over || w.ended != nil && w.ended(); w.over {
		return 0, errTokenEnded
	}
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(writeTime))
	return w.ResponseWriter.Write(b)
}

// FlushError is what a ResponseController calls.
func (w *reply) FlushError() error {
	if !w.wrote {
		w.WriteHeader(http.StatusOK)
	}
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// answer reads the body of a request and has it answered.
func (d *daemon) answer(mux http.Handler, w *reply, r *http.Request) {
	if r.ContentLength != 0 {
		b, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
		if err != nil {
			d.writeError(w, r, invalid("", "the body could not be read"))
			return
		}
		if len(b) <= maxBody { // else the rest of it is not waited for
			_ = http.NewResponseController(w.ResponseWriter).SetReadDeadline(time.Time{})
		}
		r.Body = io.NopCloser(bytes.NewReader(b))
	}
	mux.ServeHTTP(w, r)
}

// mux finds the route of a request among those that are there.
func (d *daemon) mux(there func(rt route) bool) http.Handler {
	mux := http.NewServeMux()
	for _, rt := range d.routes() {
		if !there(rt) {
			continue
		}
		mux.HandleFunc(rt.pattern, func(w http.ResponseWriter, r *http.Request) {
			defer d.survive(w, r)
			err := callerOf(r).may(rt.verb)
			if err == nil {
				err = checkQuery(r, rt.params)
			}
			if err == nil {
				err = rt.serve(w, r)
			}
			if err != nil {
				d.writeError(w, r, err)
			}
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The mux redirects a path that is not clean: here it is no route.
		if _, pattern := mux.Handler(r); pattern == "" || path.Clean(r.URL.Path) != r.URL.Path {
			// The mux's own answer is text; ask it only whether another method would do.
			probe := &headerOnly{header: http.Header{}}
			if pattern == "" {
				mux.ServeHTTP(probe, r)
			}
			if probe.status == http.StatusMethodNotAllowed {
				w.Header().Set("Allow", probe.header.Get("Allow"))
				e := invalid("", "%s takes %s, not %s", r.URL.Path, probe.header.Get("Allow"), r.Method)
				e.Status = http.StatusMethodNotAllowed
				d.writeError(w, r, e)
				return
			}
			d.writeError(w, r, refuse("not_found", "there is no such route"))
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// survive answers, and tells the journal, when a handler breaks down; what was begun to be told is cut off.
func (d *daemon) survive(w http.ResponseWriter, r *http.Request) {
	switch v := recover(); v {
	case nil:
	case http.ErrAbortHandler:
		panic(v)
	default:
		d.log.Error("a request broke down", "method", r.Method, "path", r.URL.Path, "panic", v, "stack", string(debug.Stack()))
		if out, ok := w.(*reply); ok && out.wrote {
			panic(http.ErrAbortHandler)
		}
		d.writeError(w, r, refuse("internal", "see the journal of toad"))
	}
}

type headerOnly struct {
	header http.Header
	status int
}

func (h *headerOnly) Header() http.Header         { return h.header }
func (h *headerOnly) Write(b []byte) (int, error) { return len(b), nil }
func (h *headerOnly) WriteHeader(status int)      { h.status = status }

// setType says what an answer is; no cache keeps one.
func setType(w http.ResponseWriter, kind string) {
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Cache-Control", "no-store")
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	return writeDocument(w, "application/json", status, v)
}

func writeDocument(w http.ResponseWriter, kind string, status int, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding an answer: %w", err)
	}
	setType(w, kind)
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // a client that went away is no error of ours
	return nil
}

// begun is the status of an answer that names what begins, or what is so already.
func begun(begins bool) int {
	if begins {
		return http.StatusAccepted
	}
	return http.StatusOK
}

// writeError answers with a problem. What is not a refusal is told as internal, its text to the journal only.
func (d *daemon) writeError(w http.ResponseWriter, r *http.Request, err error) {
	var e *apiError
	if !errors.As(err, &e) {
		if r.Context().Err() != nil {
			return // nobody is there to be told
		}
		d.log.Error("answering", "method", r.Method, "path", r.URL.Path, "err", err)
		e = refuse("internal", "see the journal of toad")
	} else if e.err != nil {
		d.log.Warn("refused", "path", r.URL.Path, "code", e.Code, "err", e.err)
	}
	d.countRefusal(r, e.problem)
	p := e.problem
	switch c := callerOf(r); {
	case c.local() && e.local != "":
		p.Detail += ": " + e.local
	case !c.local() && e.Code == "not_found": // what is not there and what is another's are told alike
		p = refuse("not_found", "there is no such thing for this token").problem
	}
	switch {
	case e.Status == http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", "Bearer")
		w.Header().Set("Connection", "close")
	case e.retry > 0:
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(e.retry.Seconds()))))
	}
	_ = writeDocument(w, "application/problem+json", e.Status, p) // a problem can be encoded
}

// checkQuery lets through the named parameters, each once. What is not understood is refused: a request
// that asks for less than the route does must not be taken for one that asks for all of it.
func checkQuery(r *http.Request, params []string) error {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return invalid("", "the query cannot be read")
	}
	for _, name := range slices.Sorted(maps.Keys(q)) {
		switch {
		case !slices.Contains(params, name):
			return invalid(name, "unknown parameter %q", name)
		case len(q[name]) > 1:
			return invalid(name, "%s is given twice", name)
		case q[name][0] == "":
			return invalid(name, "%s has no value", name)
		}
	}
	return nil
}

func readBody(r *http.Request) ([]byte, error) {
	b, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBody))
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		e := invalid("", "the body is larger than %d bytes", maxBody)
		e.Status = http.StatusRequestEntityTooLarge
		return nil, e
	} else if err != nil {
		return nil, invalid("", "the body could not be read")
	}
	return b, nil
}

// decode reads a body that carries exactly the named fields: none else, none twice, nothing after it. A
// field named with a question mark may be missing.
func decode(r *http.Request, v any, fields ...string) error {
	b, err := readBody(r)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return invalid("", "the body must be one JSON object")
	}
	optional := map[string]bool{}
	for i, f := range fields {
		f, optional[strings.TrimSuffix(f, "?")] = strings.CutSuffix(f, "?")
		fields[i] = f
	}
	seen := map[string]bool{}
	for dec.More() {
		t, err := dec.Token()
		name, ok := t.(string)
		if err != nil || !ok {
			return invalid("", "the body is not JSON")
		}
		switch {
		case !slices.Contains(fields, name):
			return invalid(name, "unknown field %q; the body carries exactly %s", name, strings.Join(fields, ", "))
		case seen[name]:
			return invalid(name, "%s is given twice", name)
		}
		seen[name] = true
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return invalid("", "the body is not JSON")
		}
		if string(value) == "null" {
			return invalid(name, "%s is null", name)
		}
	}
	if _, err := dec.Token(); err != nil {
		return invalid("", "the body is not JSON")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return invalid("", "something follows the JSON object")
	}
	for _, f := range fields {
		if !seen[f] && !optional[f] {
			return invalid(f, "%s is missing", f)
		}
	}
	var wrong *json.UnmarshalTypeError
	if err := json.Unmarshal(b, v); errors.As(err, &wrong) {
		kind := "string"
		switch wrong.Type.Kind() {
		case reflect.Int64:
			kind = "whole number"
		case reflect.Slice:
			kind = "list of strings"
		}
		return invalid(wrong.Field, "%s must be a %s", wrong.Field, kind)
	} else if err != nil {
		return invalid("", "the body is not JSON")
	}
	return nil
}

var (
	keyForm   = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,128}$`)
	imageForm = regexp.MustCompile(`^([a-z0-9]+([._-]+[a-z0-9]+)*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+)@sha256:[0-9a-f]{64}$`)
)

func checkForm(key string, expected int64) error {
	switch {
	case !keyForm.MatchString(key):
		return invalid("idempotency_key", "idempotency_key must be 1 to 128 of A-Z a-z 0-9 . _ : -")
	case expected < 0:
		return invalid("expected_generation", "expected_generation must not be negative")
	}
	return nil
}

// hashRequest binds a key to the request as it was sent.
func hashRequest(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s,", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func (d *daemon) postDeployment(w http.ResponseWriter, r *http.Request) error {
	var req deployRequest
	if err := decode(r, &req, "service", "image", "expected_generation", "idempotency_key"); err != nil {
		return err
	}
	switch {
	case !serviceID.MatchString(req.Service):
		return invalid("service", "service must be an identifier of lower-case letters, digits and -, at most 40 long")
	case !imageForm.MatchString(req.Image):
		return invalid("image", "image must be REPOSITORY@sha256:<64 hex digits>, fully qualified, with no tag")
	}
	r.SetPathValue("service", req.Service) // a refusal is an event of that service
	if err := checkForm(req.IdempotencyKey, *req.ExpectedGeneration); err != nil {
		return err
	}
	dry, err := boolOf(r, "dry_run")
	if err != nil {
		return err
	}
	s, err := d.serviceOf(callerOf(r), req.Service)
	if err != nil {
		return err
	}
	sub := submission{kind: "deploy", image: req.Image, expected: *req.ExpectedGeneration, key: req.IdempotencyKey, actor: callerOf(r).actor(),
		hash: hashRequest("deploy", req.Service, req.Image, fmt.Sprint(*req.ExpectedGeneration))}
	if dry {
		answer, err := s.dryRun(r.Context(), sub, callerOf(r).local())
		if err != nil {
			return err
		}
		return writeJSON(w, http.StatusOK, answer)
	}
	return answerSubmit(w, s, sub)
}

// postServiceRollback is for the service that is named; where none is, for the token's own.
func (d *daemon) postServiceRollback(w http.ResponseWriter, r *http.Request) error {
	var req rollbackRequest
	if err := decode(r, &req, "expected_generation", "idempotency_key"); err != nil {
		return err
	}
	if err := checkForm(req.IdempotencyKey, *req.ExpectedGeneration); err != nil {
		return err
	}
	s, err := d.serviceOf(callerOf(r), cmp.Or(r.PathValue("service"), callerOf(r).service))
	if err != nil {
		return err
	}
	return answerSubmit(w, s, submission{kind: "rollback", expected: *req.ExpectedGeneration, key: req.IdempotencyKey, actor: callerOf(r).actor(),
		hash: hashRequest("rollback", s.name, fmt.Sprint(*req.ExpectedGeneration))})
}

func answerSubmit(w http.ResponseWriter, s *service, sub submission) error {
	op, existing, err := s.submit(sub)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/operations/"+op.ID)
	return writeJSON(w, begun(!existing), s.wire(op))
}

func (d *daemon) postReconcile(w http.ResponseWriter, r *http.Request) error {
	var req reconcileRequest
	if err := decode(r, &req, "operation_id"); err != nil {
		return err
	}
	if !operationID.MatchString(req.OperationID) {
		return refuse("not_found", "there is no such operation")
	}
	return d.answerAsked(w, r, func(s *service) (bool, error) {
		_, err := s.reconcile(req.OperationID, callerOf(r).actor())
		return false, err // it is done when it is answered
	})
}

func (d *daemon) postSuspend(w http.ResponseWriter, r *http.Request) error {
	if err := noBody(r); err != nil {
		return err
	}
	return d.answerAsked(w, r, func(s *service) (bool, error) { return s.suspend(callerOf(r).actor()) })
}

func (d *daemon) postResume(w http.ResponseWriter, r *http.Request) error {
	if err := noBody(r); err != nil {
		return err
	}
	return d.answerAsked(w, r, func(s *service) (bool, error) { return s.resume(callerOf(r).actor()) })
}

func (d *daemon) postRetire(w http.ResponseWriter, r *http.Request) error {
	var req retireRequest
	if err := decode(r, &req, "generation"); err != nil {
		return err
	}
	if *req.Generation < 0 {
		return invalid("generation", "generation must not be negative")
	}
	return d.answerAsked(w, r, func(s *service) (bool, error) { return s.retire(*req.Generation, callerOf(r).actor()) })
}

// answerAsked answers with the service: 202 if something begins, 200 if nothing has to be waited for.
func (d *daemon) answerAsked(w http.ResponseWriter, r *http.Request, ask func(s *service) (begins bool, err error)) error {
	s, err := d.serviceOf(callerOf(r), r.PathValue("service"))
	if err != nil {
		return err
	}
	begins, err := ask(s)
	if err != nil {
		return err
	}
	return writeJSON(w, begun(begins), s.view(callerOf(r).local()))
}

// visible are the services that a caller may know of.
func (d *daemon) visible(c caller) []*service {
	if c.local() {
		return d.all()
	}
	return []*service{d.known(c.service)} // who issued its token began with this
}

// serviceOf finds a service that the caller may know of. To a token every other name is the same.
func (d *daemon) serviceOf(c caller, name string) (*service, error) {
	switch {
	case c.local():
		return d.service(name)
	case c.service == name:
		return d.visible(c)[0], nil
	}
	return nil, refuse("not_found", "there is no such service")
}

// findOperation finds an operation wherever the caller may look. An id that does not match its pattern is
// not looked for.
func (d *daemon) findOperation(c caller, id string) (*service, *operation, error) {
	if operationID.MatchString(id) {
		for _, s := range d.visible(c) {
			if r := s.rec.Load(); r != nil && r.Operation != nil && r.Operation.ID == id {
				return s, r.Operation, nil
			}
		}
		for _, s := range d.visible(c) {
			switch op, err := d.data.operation(s.name, id); {
			case err == nil:
				return s, op, nil
			case !errors.Is(err, errNotFound):
				return nil, nil, refuse("state_unavailable", "the record of this operation cannot be read").because(err)
			}
		}
	}
	return nil, nil, refuse("not_found", "there is no such operation")
}

func (d *daemon) getOperation(w http.ResponseWriter, r *http.Request) error {
	wait, err := waitOf(r)
	if err != nil {
		return err
	}
	s, op, err := d.findOperation(callerOf(r), r.PathValue("id"))
	if err != nil {
		return err
	}
	after := state(r.FormValue("after_state"))
	if _, ok := nextStates[after]; after != "" && !ok {
		return invalid("after_state", "after_state is no state of an operation")
	} else if after == "" {
		after = op.State
	}
	if wait > 0 {
		ctx, cancel := context.WithTimeout(r.Context(), wait)
		defer cancel()
		for op.State == after && !op.State.terminal() && ctx.Err() == nil {
			changed := s.changed()
			if cur := s.op(); cur == nil || cur.ID != op.ID {
				_, op, err = d.findOperation(callerOf(r), op.ID) // it ended and the next one was accepted
				if err != nil {
					return err
				}
				break
			} else if op = cur; op.State != after || op.State.terminal() {
				break
			}
			select {
			case <-changed:
			case <-ctx.Done():
			case <-d.stopping:
				cancel()
			}
		}
	}
	return writeJSON(w, http.StatusOK, s.wire(op))
}

// boolOf is a parameter of the query that is true or false; one that is not there is false.
func boolOf(r *http.Request, name string) (bool, error) {
	v := r.URL.Query().Get(name)
	if v == "" {
		return false, nil
	}
	b, err := strconv.ParseBool(v)
	if err != nil {
		return false, invalid(name, "%s must be true or false", name)
	}
	return b, nil
}

func waitOf(r *http.Request) (time.Duration, error) {
	v := r.FormValue("wait")
	if v == "" {
		return 0, nil
	}
	n, err := strconv.ParseFloat(v, 64)
	if err != nil || !(n >= 0 && n <= maxWait.Seconds()) {
		return 0, invalid("wait", "wait must be seconds from 0 to %d", int(maxWait.Seconds()))
	}
	return time.Duration(n * float64(time.Second)), nil
}

// logQuiet is how long a followed log must be quiet after the operation ended before it is complete.
const logQuiet = 300 * time.Millisecond

func (d *daemon) getLog(w http.ResponseWriter, r *http.Request) error {
	follow, err := boolOf(r, "follow")
	if err != nil {
		return err
	}
	s, op, err := d.findOperation(callerOf(r), r.PathValue("id"))
	if err != nil {
		return err
	}
	text := strings.HasPrefix(r.Header.Get("Accept"), "text/plain")
	setType(w, choose(text, "text/plain; charset=utf-8", "application/x-ndjson"))
	out := newStream(w)
	write := func(lines []logLine) error {
		var buf bytes.Buffer
		for _, l := range lines {
			if text {
				fmt.Fprintf(&buf, "%s %-12s %s\n", l.At.UTC().Format(wireTimeForm), l.State, l.Text)
				continue
			}
			b, err := json.Marshal(wireLogLineOf(l))
			if err != nil {
				return err
			}
			buf.Write(append(b, '\n'))
		}
		_, err := out.Write(buf.Bytes())
		return err
	}
	l := s.logOf(op.ID)
	if l == nil {
		lines, err := readLog(d.data.serviceFile(s.name, "operations", op.ID+".log"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		_ = write(lines)
		return nil
	}
	for seq := int64(0); ; {
		if now := s.logOf(op.ID); now != nil {
			l = now // the records were read again
		}
		lines, grown := l.since(seq)
		if write(lines) != nil || !follow {
			return nil
		}
		seq += int64(len(lines))
		var quiet <-chan time.Time
		if cur := s.op(); cur == nil || cur.ID != op.ID || cur.State.terminal() {
			quiet = time.After(logQuiet)
		}
		select {
		case <-grown:
		case <-s.changed():
		case <-quiet:
			return nil
		case <-r.Context().Done():
			return nil
		case <-d.stopping:
			return nil
		}
	}
}

// noBody refuses a body that says anything.
func noBody(r *http.Request) error {
	b, err := readBody(r)
	if err != nil {
		return err
	}
	if b = bytes.TrimSpace(b); len(b) > 0 && string(b) != "{}" {
		return invalid("", "this request carries no body")
	}
	return nil
}

func (d *daemon) postOperationRollback(w http.ResponseWriter, r *http.Request) error {
	if err := noBody(r); err != nil {
		return err
	}
	s, op, err := d.findOperation(callerOf(r), r.PathValue("id"))
	if err != nil {
		return err
	}
	r.SetPathValue("service", s.name)
	op, again, err := s.requestRollback(op.ID, callerOf(r).actor())
	if err != nil {
		return err
	}
	return writeJSON(w, begun(!again), s.wire(op))
}

func (d *daemon) getServices(w http.ResponseWriter, r *http.Request) error {
	c := callerOf(r)
	list := wireServices{Services: []wireService{}}
	for _, s := range d.visible(c) {
		list.Services = append(list.Services, s.view(c.local()))
	}
	return writeJSON(w, http.StatusOK, list)
}

func (d *daemon) getService(w http.ResponseWriter, r *http.Request) error {
	s, err := d.serviceOf(callerOf(r), r.PathValue("service"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, s.view(callerOf(r).local()))
}

func (d *daemon) getOperations(w http.ResponseWriter, r *http.Request) error {
	s, err := d.serviceOf(callerOf(r), r.PathValue("service"))
	if err != nil {
		return err
	}
	limit, before := 20, r.FormValue("before")
	if v := r.FormValue("limit"); v != "" {
		if limit, err = strconv.Atoi(v); err != nil || limit < 1 || limit > 200 {
			return invalid("limit", "limit must be a number from 1 to 200")
		}
	}
	if before != "" && !operationID.MatchString(before) {
		return invalid("before", "before must be an operation's id")
	}
	ids, err := d.data.operationIDs(s.name)
	if err != nil {
		return err
	}
	if r := s.rec.Load(); r != nil && r.Operation != nil && !slices.Contains(ids, r.Operation.ID) { // not archived yet
		ids = append(ids, r.Operation.ID)
		slices.Sort(ids)
		slices.Reverse(ids)
	}
	list := wireOperations{Operations: []wireOperation{}}
	for _, id := range ids {
		if before != "" && id >= before {
			continue
		}
		if len(list.Operations) == limit {
			list.Next = list.Operations[limit-1].ID
			break
		}
		_, op, err := d.findOperation(callerOf(r), id)
		if err != nil { // damaged, which fsck tells, or pruned meanwhile
			d.log.Warn("listing operations", "service", s.name, "operation", id, "err", err)
			continue
		}
		list.Operations = append(list.Operations, s.wire(op))
	}
	return writeJSON(w, http.StatusOK, list)
}

func getVersion(w http.ResponseWriter, _ *http.Request) error {
	return writeJSON(w, http.StatusOK, buildVersion())
}

// getHealth tells a token of its own service only.
func (d *daemon) getHealth(w http.ResponseWriter, r *http.Request) error {
	h := wireHealthz{Status: "ok", Services: map[string]int{"total": 0, "unavailable": 0, "rolling_out": 0, "held": 0, "suspended": 0}}
	for _, s := range d.visible(callerOf(r)) {
		h.Services["total"]++
		s.live.Lock()
		unavailable := s.live.unavailable != nil
		s.live.Unlock()
		rec := s.rec.Load()
		switch {
		case unavailable:
			h.Services["unavailable"]++
			h.Status = "degraded"
		case rec.active() != nil:
			h.Services["rolling_out"]++
		case rec.Held != nil:
			h.Services["held"]++
		case rec.Suspended != nil:
			h.Services["suspended"]++
		}
	}
	return writeJSON(w, http.StatusOK, h)
}

// getMetrics answers in the text format of Prometheus, from memory. What it tells is known already: a
// library that counts would be larger than this.
func (d *daemon) getMetrics(w http.ResponseWriter, r *http.Request) error {
	var b strings.Builder
	metric := func(name, kind, help string) { fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind) }
	each := func(name, kind, help string, value func(s *service, r *record) any) {
		metric(name, kind, help)
		for _, s := range d.all() {
			if r := s.rec.Load(); r != nil {
				fmt.Fprintf(&b, "%s{service=%q} %v\n", name, s.name, value(s, r))
			}
		}
	}
	truth := func(yes bool) int {
		if yes {
			return 1
		}
		return 0
	}
	v := buildVersion()
	metric("toad_build_info", "gauge", "The running release.")
	fmt.Fprintf(&b, "toad_build_info{version=%q,go=%q} 1\n", v.Version, v.Go)

	states := map[string]int{}
	for _, s := range d.all() {
		s.live.Lock()
		st := s.live.health.state
		if s.live.unavailable != nil {
			st = "unavailable"
		}
		s.live.Unlock()
		states[st]++
	}
	metric("toad_services", "gauge", "Services by the state of their health; unavailable: the records cannot be used.")
	for _, st := range []string{"running", "starting", "stopped", "failed", "held", "foreign", "unknown", "unavailable"} {
		fmt.Fprintf(&b, "toad_services{state=%q} %d\n", st, states[st])
	}
	metric("toad_operations_total", "counter", "Operations that ended since Toad's start, by outcome.")
	for _, s := range d.all() {
		s.live.Lock()
		for _, st := range []state{promoted, rolledBack, hasFailed} {
			fmt.Fprintf(&b, "toad_operations_total{service=%q,outcome=%q} %d\n", s.name, st, s.live.outcomes[st])
		}
		s.live.Unlock()
	}
	each("toad_service_generation", "gauge", "The service's generation.", func(_ *service, r *record) any { return r.Generation })
	each("toad_service_restarts_since_promotion", "gauge", "Restarts of the current revision.", func(_ *service, r *record) any { return r.Watch.Count })
	each("toad_service_ready", "gauge", "Whether the instance was ready when it was last asked.", func(s *service, _ *record) any {
		s.live.Lock()
		defer s.live.Unlock()
		return truth(s.live.health.ready)
	})
	each("toad_service_rollback_ready", "gauge", "Whether a revision is retained and could be restored.", func(s *service, r *record) any {
		s.live.Lock()
		defer s.live.Unlock()
		problems, _, looked := s.live.restorable(r)
		return truth(r.Rollback != nil && looked && len(problems) == 0)
	})
	each("toad_service_rolling_out", "gauge", "Whether an operation is under way.", func(_ *service, r *record) any { return truth(r.active() != nil) })
	each("toad_service_suspended", "gauge", "Whether the service is suspended.", func(_ *service, r *record) any { return truth(r.Suspended != nil) })
	each("toad_service_barrier", "gauge", "Whether an operation that went wrong waits to be acknowledged.", func(_ *service, r *record) any { return truth(r.Barrier != nil) })
	setType(w, "text/plain; version=0.0.4; charset=utf-8")
	_, _ = io.WriteString(w, b.String())
	return nil
}

// logOf is the live log of the operation under way or last ended, nil for any other.
func (s *service) logOf(id string) *operationLog {
	s.live.Lock()
	defer s.live.Unlock()
	if l := s.live.log; l != nil && l.operation == id {
		return l
	}
	return nil
}

// wire is an operation as anyone with access to the service may read it.
func (s *service) wire(op *operation) wireOperation {
	o := wireOperation{
		ID: op.ID, Service: s.name, State: string(op.State), Terminal: op.State.terminal(), Generation: op.Candidate.Generation,
		ExpectedGeneration: op.Expected, Candidate: wireCandidate{op.Candidate.Image, op.Candidate.digest()},
		RequestedBy: op.RequestedBy, CreatedAt: wireTime(op.CreatedAt), UpdatedAt: wireTime(op.UpdatedAt), FinishedAt: wireTimeOf(op.FinishedAt),
		Timeline: []wireTransition{}, Restarts: op.Restarts.Count, RestartBudget: op.RestartBudget, StabilityWindowSeconds: op.StabilitySeconds,
		ReadyForSeconds: op.ReadySeconds, RollbackRequested: op.RollbackRequested, Failure: op.Failure,
	}
	if p := op.Previous; p != nil {
		o.Previous = &wirePrevious{p.Generation, p.digest()}
	}
	for _, t := range op.Timeline {
		o.Timeline = append(o.Timeline, wireTransition{string(t.State), wireTime(t.At)})
	}
	var d *deadline
	switch op.State {
	case preparing:
		d = op.FetchDeadline
	case activating, inProbation, promoting:
		d = op.RolloutDeadline
	case rollingBack:
		d = op.RollbackDeadline
	}
	if d != nil {
		o.DeadlineAt = wireTimeOf(&d.At)
	}
	if op.State == inProbation || op.State == promoting {
		o.ReadyForSeconds = seconds(s.readyFor())
	}
	return o
}

func wireTimeOf(t *time.Time) *wireTime {
	if t == nil {
		return nil
	}
	w := wireTime(*t)
	return &w
}

func wireLogLineOf(l logLine) wireLogLine {
	return wireLogLine{Seq: l.Seq, At: wireTime(l.At), State: string(l.State), Code: l.Code, Text: l.Text}
}

func wireRevisionOf(p *promotedRevision) *wireRevision {
	return &wireRevision{Generation: p.Generation, Image: p.Image, Digest: p.digest(), PromotedAt: wireTime(p.PromotedAt)}
}

// view is the service as anyone with access to it may read it, from memory only. Local readers are
// also told why an enrollment or a record is refused, with the names of files.
func (s *service) view(local bool) wireService {
	v := wireService{Service: s.name}
	s.live.Lock()
	r := s.rec.Load()
	unavailable, h, closing := s.live.unavailable, s.live.health, s.live.closing
	problems, _, checked := s.live.restorable(r)
	en, enErr, compared := s.live.enrolled, s.live.enrollErr, s.live.compared
	s.live.Unlock()
	v.Health = wireHealth{State: h.state, Ready: h.ready, Digest: h.digest, MatchesCurrent: h.current}
	if !h.observedAt.IsZero() {
		v.Health.ObservedAt = wireTimeOf(&h.observedAt)
	}
	if enErr != nil {
		if local {
			v.Enrollment.Problem = enErr.Error()
		}
	} else {
		p, q := en.Probation, en.Readiness
		v.Enrollment = wireEnrollment{Valid: true, Unit: en.Unit, Repository: en.Repository, ReadinessScheme: q.Scheme, ReadinessPort: q.Port,
			ReadinessPath: q.Path, IntervalSeconds: seconds(time.Duration(q.Interval)), TimeoutSeconds: seconds(time.Duration(q.Timeout)),
			RolloutDeadlineSeconds: seconds(time.Duration(p.RolloutDeadline)), StartupDeadlineSeconds: seconds(time.Duration(p.StartupDeadline)),
			StabilityWindowSeconds: seconds(time.Duration(p.StabilityWindow)), RestartBudget: p.RestartBudget,
			FetchDeadlineSeconds: seconds(time.Duration(en.FetchDeadline)), StopDeadlineSeconds: seconds(time.Duration(en.StopDeadline)), Barrier: en.Barrier,
			DiffersFromCurrent: compared.differs && compared.of(r, en.Hash)}
	}
	if unavailable != nil || r == nil {
		if local && unavailable != nil {
			v.Problem = unavailable.Error()
		}
		for _, a := range []string{"deploy", "rollback", "rollback_operation", "reconcile", "suspend", "resume"} {
			v.Actions = append(v.Actions, wireAction{Name: a, Reason: "state_unavailable"})
		}
		return v
	}
	v.Generation, v.Installed = r.Generation, r.Installed
	v.Health.RestartsSincePromotion = r.Watch.Count
	if r.Current != nil {
		v.Current = wireRevisionOf(r.Current)
	}
	if r.Rollback != nil {
		v.Rollback = &wireRollback{wireRevision: *wireRevisionOf(r.Rollback), Ready: checked && len(problems) == 0, Problems: append([]wireProblem{}, problems...)}
	}
	if op := r.Operation; op != nil {
		w := s.wire(op)
		if op.State.terminal() {
			v.LastOperation = &w
		} else {
			v.ActiveOperation = &w
		}
	}
	if r.Held != nil {
		v.Held = &wireHeld{OperationID: r.Held.Operation, Since: wireTime(r.Held.Since), Remains: append([]string{}, r.Held.Remains...)}
	}
	if p := r.Barrier; p != nil {
		v.Barrier = &wireBarrier{p.Operation, wireTime(p.RaisedAt)}
	}
	if p := r.Suspended; p != nil {
		v.Suspended = &wireSuspended{wireTime(p.Since), p.By, append([]string{}, p.Remains...)}
	}
	if p := r.Retired; p != nil {
		v.Retired = &wireRetired{wireTime(p.Since), p.By, p.Done, append([]string{}, p.Remains...)}
	}
	v.Actions = r.actions(closing, enErr)
	return v
}

// actions are what can be done with the service now; of what cannot, the reason is the code of its refusal.
func (r *record) actions(closing bool, enErr error) (list []wireAction) {
	deploy, end := "", "not_rollbackable"
	reconcile, suspend, resume := "no_barrier", "", "not_suspended"
	switch {
	case closing:
		deploy = "shutting_down"
	case enErr != nil:
		deploy = "enrollment_invalid"
	case r.Suspended != nil || r.duty() == retiring:
		deploy = "suspended"
	case r.Held != nil:
		deploy = "held"
	case r.Barrier != nil:
		deploy = "rollback_barrier"
	case r.active() != nil:
		deploy = "rollout_active"
	}
	if a := r.active(); a != nil && a.State != rollingBack && !a.RollbackRequested {
		end = ""
	}
	if r.Barrier != nil {
		reconcile = ""
	}
	switch {
	case r.Suspended != nil:
		suspend, resume = "suspended", ""
	case r.duty() == retiring:
		suspend, resume = "suspended", "suspended"
	case r.active() != nil:
		suspend = "rollout_active"
	case r.Current == nil:
		suspend = "no_revision"
	}
	if closing {
		reconcile, suspend, resume = "shutting_down", "shutting_down", "shutting_down"
	}
	rollback := deploy
	if rollback == "" && (r.Rollback == nil || r.Current.ByRollback) {
		rollback = "not_rollbackable"
	}
	for _, a := range []struct{ name, reason string }{{"deploy", deploy}, {"rollback", rollback}, {"rollback_operation", end},
		{"reconcile", reconcile}, {"suspend", suspend}, {"resume", resume}} {
		list = append(list, wireAction{Name: a.name, Enabled: a.reason == "", Reason: a.reason})
	}
	return list
}
