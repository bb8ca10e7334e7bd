// api.go is HTTP: the routes, requests and answers, errors, and waiting. Wire types and records are
// different structs on purpose: a private field of a record cannot leak by being added.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Durations go over the wire in seconds, times as RFC 3339 UTC with milliseconds.
type wireTime time.Time

func (t wireTime) MarshalJSON() ([]byte, error) {
	return []byte(`"` + time.Time(t).UTC().Format("2006-01-02T15:04:05.000Z") + `"`), nil
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
}

type wireService struct {
	Service         string         `json:"service"`
	Generation      int64          `json:"generation"`
	Current         *wireRevision  `json:"current"`
	Rollback        *wireRollback  `json:"rollback"`
	ActiveOperation *wireOperation `json:"active_operation"`
	LastOperation   *wireOperation `json:"last_operation"`
	Held            *wireHeld      `json:"held"`
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
	CurrentGeneration *int64 `json:"current_generation,omitempty"`
	OperationID       string `json:"operation_id,omitempty"`
}

// apiError is a refusal: what the client is told, and nothing else of why.
type apiError struct {
	problem
	err error // for the journal
}

func (e *apiError) Error() string { return e.Code + ": " + e.Detail }
func (e *apiError) Unwrap() error { return e.err }

// statuses maps each code to its HTTP status.
var statuses = map[string]int{
	"invalid_request": 400, "not_found": 404,
	"stale_generation": 409, "rollout_active": 409, "held": 409, "not_rollbackable": 409,
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

// maxBody bounds a request's body.
const maxBody = 16 << 10

// maxWait bounds a long poll.
const maxWait = 60 * time.Second

// handler serves the administration socket: everything, for whoever the file system lets in.
func (d *daemon) handler() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, h func(w http.ResponseWriter, r *http.Request) error, params ...string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			err := checkQuery(r, params)
			if err == nil {
				err = h(w, r)
			}
			if err != nil {
				d.writeError(w, r, err)
			}
		})
	}
	handle("POST /v1/deployments", d.postDeployment)
	handle("GET /v1/operations/{id}", d.getOperation, "wait", "after_state")
	handle("GET /v1/operations/{id}/log", d.getLog, "follow")
	handle("POST /v1/operations/{id}/rollback", d.postOperationRollback)
	handle("GET /v1/services", d.getServices)
	handle("GET /v1/services/{service}", d.getService)
	handle("GET /v1/services/{service}/operations", d.getOperations, "limit", "before")
	handle("POST /v1/services/{service}/rollback", d.postServiceRollback)
	handle("GET /v1/version", func(w http.ResponseWriter, r *http.Request) error { return writeJSON(w, 200, buildVersion()) })
	handle("GET /v1/health", d.getHealth)
	handle("GET /v1/openapi.json", getDescription)
	handle("POST /v1/fsck", d.postFsck)
	handle("GET /v1/backup", d.getBackup)
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

type headerOnly struct {
	header http.Header
	status int
}

func (h *headerOnly) Header() http.Header         { return h.header }
func (h *headerOnly) Write(b []byte) (int, error) { return len(b), nil }
func (h *headerOnly) WriteHeader(status int)      { h.status = status }

func writeJSON(w http.ResponseWriter, status int, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding an answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // a client that went away is no error of ours
	return nil
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
	b, _ := json.MarshalIndent(e.problem, "", "  ")
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(e.Status)
	_, _ = w.Write(append(b, '\n'))
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

// decode reads a body that carries exactly the named fields: none else, none twice, nothing after it.
func decode(r *http.Request, v any, fields ...string) error {
	b, err := readBody(r)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return invalid("", "the body must be one JSON object")
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
		if !seen[f] {
			return invalid(f, "%s is missing", f)
		}
	}
	var wrong *json.UnmarshalTypeError
	if err := json.Unmarshal(b, v); errors.As(err, &wrong) {
		kind := "string"
		if wrong.Type.Kind() == reflect.Int64 {
			kind = "whole number"
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
	if err := checkForm(req.IdempotencyKey, *req.ExpectedGeneration); err != nil {
		return err
	}
	s, err := d.service(req.Service)
	if err != nil {
		return err
	}
	return d.answerSubmit(w, s, submission{kind: "deploy", image: req.Image, expected: *req.ExpectedGeneration, key: req.IdempotencyKey, actor: callerOf(r).actor(),
		hash: hashRequest("deploy", req.Service, req.Image, fmt.Sprint(*req.ExpectedGeneration))})
}

func (d *daemon) postServiceRollback(w http.ResponseWriter, r *http.Request) error {
	var req rollbackRequest
	if err := decode(r, &req, "expected_generation", "idempotency_key"); err != nil {
		return err
	}
	if err := checkForm(req.IdempotencyKey, *req.ExpectedGeneration); err != nil {
		return err
	}
	s, err := d.service(r.PathValue("service"))
	if err != nil {
		return err
	}
	return d.answerSubmit(w, s, submission{kind: "rollback", expected: *req.ExpectedGeneration, key: req.IdempotencyKey, actor: callerOf(r).actor(),
		hash: hashRequest("rollback", s.name, fmt.Sprint(*req.ExpectedGeneration))})
}

func (d *daemon) answerSubmit(w http.ResponseWriter, s *service, sub submission) error {
	op, existing, err := s.submit(sub)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/v1/operations/"+op.ID)
	if existing {
		return writeJSON(w, http.StatusOK, s.wire(op))
	}
	return writeJSON(w, http.StatusAccepted, s.wire(op))
}

// findOperation finds an operation wherever it is. An id that does not match its pattern is not looked for.
func (d *daemon) findOperation(id string) (*service, *operation, error) {
	if operationID.MatchString(id) {
		for _, s := range d.all() {
			if r := s.rec.Load(); r != nil && r.Operation != nil && r.Operation.ID == id {
				return s, r.Operation, nil
			}
		}
		for _, s := range d.all() {
			switch op, err := d.data.operation(s.name, id); {
			case err == nil:
				return s, op, nil
			case !errors.Is(err, errNotFound):
				e := refuse("state_unavailable", "the record of this operation cannot be read")
				e.err = err
				return nil, nil, e
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
	s, op, err := d.findOperation(r.PathValue("id"))
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
				_, op, err = d.findOperation(op.ID) // it ended and the next one was accepted
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
	follow := false
	if v := r.FormValue("follow"); v != "" {
		var err error
		if follow, err = strconv.ParseBool(v); err != nil {
			return invalid("follow", "follow must be true or false")
		}
	}
	s, op, err := d.findOperation(r.PathValue("id"))
	if err != nil {
		return err
	}
	text := strings.HasPrefix(r.Header.Get("Accept"), "text/plain")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Type", "application/x-ndjson")
	if text {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	}
	write := func(lines []logLine) error {
		var buf bytes.Buffer
		for _, l := range lines {
			if text {
				fmt.Fprintf(&buf, "%s %-12s %s\n", l.At.UTC().Format("2006-01-02T15:04:05.000Z"), l.State, l.Text)
				continue
			}
			b, err := json.Marshal(wireLogLine{Seq: l.Seq, At: wireTime(l.At), State: string(l.State), Code: l.Code, Text: l.Text})
			if err != nil {
				return err
			}
			buf.Write(append(b, '\n'))
		}
		_, err := w.Write(buf.Bytes())
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
	rc := http.NewResponseController(w)
	for seq := int64(0); ; {
		lines, grown := l.since(seq)
		_ = rc.SetWriteDeadline(time.Now().Add(30 * time.Second)) // a reader that does not read is let go
		if write(lines) != nil || !follow {
			return nil
		}
		_ = rc.Flush()
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

func (d *daemon) postOperationRollback(w http.ResponseWriter, r *http.Request) error {
	b, err := readBody(r)
	if err != nil {
		return err
	}
	if b = bytes.TrimSpace(b); len(b) > 0 && string(b) != "{}" {
		return invalid("", "this request carries no body")
	}
	s, op, err := d.findOperation(r.PathValue("id"))
	if err != nil {
		return err
	}
	op, again, err := s.requestRollback(op.ID, callerOf(r).actor())
	if err != nil {
		return err
	}
	if again {
		return writeJSON(w, http.StatusOK, s.wire(op))
	}
	return writeJSON(w, http.StatusAccepted, s.wire(op))
}

func (d *daemon) getServices(w http.ResponseWriter, r *http.Request) error {
	d.refresh()
	list := wireServices{Services: []wireService{}}
	for _, s := range d.all() {
		list.Services = append(list.Services, s.view(callerOf(r).local()))
	}
	return writeJSON(w, http.StatusOK, list)
}

func (d *daemon) getService(w http.ResponseWriter, r *http.Request) error {
	s, err := d.service(r.PathValue("service"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, s.view(callerOf(r).local()))
}

func (d *daemon) getOperations(w http.ResponseWriter, r *http.Request) error {
	s, err := d.service(r.PathValue("service"))
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
	if r := s.rec.Load(); r != nil && r.Operation != nil && (len(ids) == 0 || ids[0] != r.Operation.ID) {
		ids = slices.Insert(ids, 0, r.Operation.ID) // not archived yet
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
		_, op, err := d.findOperation(id)
		if err != nil {
			return err
		}
		list.Operations = append(list.Operations, s.wire(op))
	}
	return writeJSON(w, http.StatusOK, list)
}

func (d *daemon) getHealth(w http.ResponseWriter, r *http.Request) error {
	h := wireHealthz{Status: "ok", Services: map[string]int{"total": 0, "unavailable": 0, "rolling_out": 0, "held": 0}}
	for _, s := range d.all() {
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
		}
	}
	return writeJSON(w, http.StatusOK, h)
}

// logOf is the live log of the operation under way or last ended, nil for any other.
func (s *service) logOf(id string) *operationLog {
	op := s.op()
	s.live.Lock()
	defer s.live.Unlock()
	if op == nil || op.ID != id {
		return nil
	}
	return s.live.log
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

func wireRevisionOf(p *promotedRevision) *wireRevision {
	return &wireRevision{Generation: p.Generation, Image: p.Image, Digest: p.digest(), PromotedAt: wireTime(p.PromotedAt)}
}

// view is the service as anyone with access to it may read it, from memory only. Local readers are
// also told why an enrollment or a record is refused, with the names of files.
func (s *service) view(local bool) wireService {
	v := wireService{Service: s.name}
	s.live.Lock()
	unavailable, h, problems, checked, closing := s.live.unavailable, s.live.health, s.live.problems, s.live.checked, s.live.closing
	s.live.Unlock()
	v.Health = wireHealth{State: h.state, Ready: h.ready, Digest: h.digest, MatchesCurrent: h.current}
	if !h.observedAt.IsZero() {
		v.Health.ObservedAt = wireTimeOf(&h.observedAt)
	}
	en, enErr := s.enroll()
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
			FetchDeadlineSeconds: seconds(time.Duration(en.FetchDeadline)), StopDeadlineSeconds: seconds(time.Duration(en.StopDeadline))}
	}
	r := s.rec.Load()
	if unavailable != nil || r == nil {
		if local && unavailable != nil {
			v.Problem = unavailable.Error()
		}
		for _, a := range []string{"deploy", "rollback", "rollback_operation"} {
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
	deploy, rollback, end := "", "", "not_rollbackable"
	switch {
	case closing:
		deploy = "shutting_down"
	case enErr != nil:
		deploy = "enrollment_invalid"
	case r.Held != nil:
		deploy = "held"
	case r.active() != nil:
		deploy, end = "rollout_active", ""
		if a := r.active(); a.State == rollingBack || a.RollbackRequested {
			end = "not_rollbackable"
		}
	}
	if rollback = deploy; rollback == "" && (r.Rollback == nil || r.Current.ByRollback) {
		rollback = "not_rollbackable"
	}
	for _, a := range []struct{ name, reason string }{{"deploy", deploy}, {"rollback", rollback}, {"rollback_operation", end}} {
		v.Actions = append(v.Actions, wireAction{Name: a.name, Enabled: a.reason == "", Reason: a.reason})
	}
	return v
}
