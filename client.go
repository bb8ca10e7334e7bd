// client.go is the operator's side: it speaks HTTP to a running server and knows its wire types,
// never a record. What it prints comes from a server and may carry a workload's words: all of it passes
// printable or escaped, which let no control character through to a terminal. Elsewhere than on a terminal
// a candidate's own output comes as it was written.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf16"

	"github.com/peterbourgon/ff/v3/ffcli"
	"golang.org/x/sys/unix"
)

// The exit statuses are part of the interface: pipelines branch on them.
const (
	exitRefused     = 1
	exitUsage       = 2
	exitFailed      = 3
	exitRolledBack  = 4
	exitUnreachable = 5
	exitInterrupted = 130
)

const (
	defaultSocket = "/data/run/toad.sock"
	// patience is how long a server that was there is waited for: a restart, a new release of Toad.
	patience = 2 * time.Minute
	// answerTime is what an answer may take beyond the wait that was asked for.
	answerTime = 30 * time.Second
	// pace is the least time between two looks at an operation that did not change.
	pace = 250 * time.Millisecond
)

// commandError ends a command with that status. Without a text everything is said already.
type commandError struct {
	status     int
	text, hint string
}

func (e *commandError) Error() string { return e.text }

func usageError(text, hint string) error { return &commandError{exitUsage, text, hint} }

// wantArgs checks the arguments of a command against the names of those it takes. Those that may be left
// out stand last, in brackets.
func wantArgs(command string, args []string, names ...string) error {
	hint := "toad " + command + " -h shows the usage"
	if n := len(args); n < len(names) && names[n][0] != '[' {
		return usageError(command+": "+names[n]+" is missing", hint)
	}
	if len(args) > len(names) {
		return usageError(fmt.Sprintf("%s: one argument too many: %s", command, args[len(names)]), hint)
	}
	for i, arg := range args {
		switch name := strings.Trim(names[i], "[]"); {
		case name == "SERVICE" && !serviceID.MatchString(arg):
			return usageError(fmt.Sprintf("%s: not a service: %q", command, arg), "toad status lists the services")
		case name == "OPERATION" && !operationID.MatchString(arg):
			return usageError(fmt.Sprintf("%s: not an operation: %q", command, arg), "toad history SERVICE lists them")
		}
	}
	return nil
}

// client is one command's connection to the server.
type client struct {
	out     io.Writer // the answer, and nothing else
	log     *screen   // everything else
	json    bool
	socket  string
	server  string // URL of a server that is reached over TCP with a token; "": the socket
	token   func() (string, error)
	reached atomic.Bool // a connection came about at least once
	http    *http.Client
}

// newClient makes a client that is complete once the flags are parsed: over the socket, or with --server
// over TCP with a token. How the server is reached is decided here and nowhere else.
func newClient(flags *flag.FlagSet, stdout, stderr io.Writer) *client {
	c := localClient(flags, stdout, stderr)
	var file string
	flags.StringVar(&c.server, "server", "", "`URL` of a server, for the holder of a token: TOAD_TOKEN, or --token-file")
	flags.StringVar(&file, "token-file", "", "`file` with the token for --server")
	c.token = func() (string, error) {
		token := os.Getenv("TOAD_TOKEN")
		if file != "" {
			b, err := os.ReadFile(file)
			if err != nil {
				return "", usageError("reading the token: "+err.Error(), "--token-file names a file with nothing but the token")
			}
			token = string(b)
		}
		if token = strings.TrimSpace(token); token == "" || strings.ContainsFunc(token, unicode.IsSpace) {
			return "", usageError("there is no token for "+c.server, "set TOAD_TOKEN or --token-file; on the host, toad token issue makes one")
		}
		return token, nil
	}
	return c
}

// localClient makes a client of what only the administration socket does.
func localClient(flags *flag.FlagSet, stdout, stderr io.Writer) *client {
	c := &client{out: stdout, log: newScreen(stderr)}
	flags.StringVar(&c.socket, "socket", defaultSocket, "the server's administration `socket`")
	flags.BoolVar(&c.json, "json", false, "print the answer as JSON")
	c.http = &http.Client{
		Transport: &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if c.server == "" {
				network, address = "unix", c.socket
			}
			conn, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, network, address)
			if err == nil {
				c.reached.Store(true)
			}
			return conn, err
		}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c
}

// command spells a command line that reaches the same server.
func (c *client) command(args ...string) string {
	if c.server != "" {
		args = append(args, "--server", c.server)
	} else if c.socket != defaultSocket {
		args = append(args, "--socket", c.socket)
	}
	return "toad " + strings.Join(args, " ")
}

// Requests end in one of three ways besides an answer: the operator stopped them, the connection or
// the answer was lost (what became of the request is unknown), or the server refused.

var errStopped = errors.New("interrupted")

type lostError struct{ error }

func (e lostError) Unwrap() error { return e.error }

type refusal struct {
	problem
	raw []byte
}

func (r *refusal) Error() string {
	text := r.Detail
	if text == "" {
		text = r.Title
	}
	if r.Field != "" {
		text += " (field " + r.Field + ")"
	}
	text += " (" + r.Code
	if r.CurrentGeneration != nil {
		text += fmt.Sprintf(", current generation %d", *r.CurrentGeneration)
	}
	return text + ")"
}

// open makes one request and returns an answer that is a success.
func (c *client) open(ctx context.Context, method, path string, in any) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(b)
	}
	base := "http://toad"
	if c.server != "" {
		u, err := url.Parse(c.server)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
			return nil, usageError("--server is no URL of a server", "for example http://127.0.0.1:8440")
		}
		base = strings.TrimRight(c.server, "/")
	}
	req, err := http.NewRequestWithContext(ctx, method, base+path, body)
	if err != nil {
		return nil, err
	}
	if c.server != "" {
		token, err := c.token()
		if err != nil {
			return nil, err
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) { // it repeats the method and the made-up host
			err = u.Err
		}
		return nil, lostError{err}
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer resp.Body.Close()
	r := &refusal{}
	if r.raw, err = io.ReadAll(io.LimitReader(resp.Body, 1<<20)); err != nil {
		return nil, lostError{err}
	}
	if json.Unmarshal(r.raw, &r.problem) != nil || r.Code == "" {
		r.problem = problem{Title: "the server answered " + resp.Status, Code: "internal"}
		r.Status = resp.StatusCode
		r.raw, _ = json.Marshal(r.problem)
	}
	r.Status = resp.StatusCode
	return nil, r
}

// call makes one request once, decodes the answer into out unless that is nil, and returns the whole of it.
func (c *client) call(ctx context.Context, method, path string, in, out any, timeout time.Duration) ([]byte, error) {
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	raw, err := func() ([]byte, error) {
		resp, err := c.open(bounded, method, path, in)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			return nil, lostError{err}
		}
		return raw, nil
	}()
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, errStopped
	case err == nil && out != nil:
		err = decodeAnswer(raw, out)
	}
	return raw, err
}

// insist makes a request until it is answered, for as long as patience lasts. The request must bear
// repetition: a GET, or a POST that is the same to the server each time. A server that was never
// reached is not waited for.
func (c *client) insist(ctx context.Context, method, path string, in, out any, timeout time.Duration) ([]byte, error) {
	var giveUp time.Time
	for wait := pace; ; wait = min(2*wait, 5*time.Second) {
		raw, err := c.call(ctx, method, path, in, out, timeout)
		lost := errors.As(err, new(lostError))
		var r *refusal
		if errors.As(err, &r) && r.Status == http.StatusServiceUnavailable {
			// Toad stops or starts. A first POST is refused by it, a repeated one learns nothing.
			lost = method == http.MethodGet || !giveUp.IsZero()
		}
		switch {
		case !lost:
			if !giveUp.IsZero() && err == nil {
				c.log.note("connected again")
			}
			return raw, err
		case !c.reached.Load():
			return nil, err
		case giveUp.IsZero():
			giveUp = time.Now().Add(patience)
			c.log.note("no answer: %v; trying again for %v", err, patience)
		case time.Now().After(giveUp):
			return nil, lostError{fmt.Errorf("no answer for %v: %w", patience, err)}
		}
		if !pauseFor(ctx, wait) {
			return nil, errStopped
		}
	}
}

// noServer tells that a request was lost because no server was there to take it.
func (c *client) noServer(err error) bool {
	return errors.As(err, new(lostError)) && !c.reached.Load()
}

// pauseFor waits unless it is interrupted.
func pauseFor(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// explain turns the end of a request into the end of the command.
func (c *client) explain(err error, doing, service string) *commandError {
	if errors.Is(err, errStopped) {
		return &commandError{status: exitInterrupted, text: doing + ": interrupted"}
	}
	if e := (*commandError)(nil); errors.As(err, &e) {
		return e
	}
	// A refusal first: one that lasted longer than patience is wrapped in a lost connection.
	if r := (*refusal)(nil); errors.As(err, &r) && !errors.As(err, new(lostError)) {
		if c.json {
			c.document(r.raw)
		}
		return &commandError{exitRefused, doing + ": " + r.Error(), c.hintFor(r, service)}
	}
	if !errors.As(err, new(lostError)) {
		return &commandError{status: exitRefused, text: doing + ": " + err.Error()}
	}
	e := &commandError{status: exitUnreachable, text: doing + ": the server is out of reach: " + err.Error()}
	switch {
	case c.server != "":
		e.hint = "is " + c.server + " right, and the server running?"
	case errors.Is(err, fs.ErrNotExist):
		e.hint = "is the server running? --socket or TOAD_SOCKET names another socket"
	case errors.Is(err, fs.ErrPermission):
		e.hint = "the socket is for its owner and for root only"
	case errors.Is(err, syscall.ECONNREFUSED):
		e.hint = "the server does not run: see systemctl --user status toad"
	}
	return e
}

// hintFor says what to do about a refusal.
func (c *client) hintFor(r *refusal, service string) string {
	status := c.command("status")
	if service != "" {
		status = c.command("status", service)
	}
	switch r.Code {
	case "unauthorized":
		return "the token is unknown, revoked or expired: on the host, toad token list shows them"
	case "forbidden":
		return "a token with that verb is needed: on the host, toad token issue makes one"
	case "stale_generation":
		return "read the generation again: " + status
	case "rollout_active":
		return "another operation is under way: " + c.command("watch", r.OperationID)
	case "rollback_barrier":
		return "see what went wrong, then acknowledge it: " + c.command("log", r.OperationID) + "; " + c.command("reconcile", cmp.Or(service, "SERVICE"), r.OperationID)
	case "key_reused":
		return "that key belongs to another request: " + c.command("watch", r.OperationID)
	case "repository_not_allowed", "enrollment_invalid", "suspended", "held", "not_rollbackable", "no_revision", "enrolled", "state_unavailable":
		return "see " + status
	case "not_found":
		if c.server != "" {
			return "a token is for one service; what only the host's operator may do needs the administration socket"
		}
		return "see " + c.command("status") + " for the services, toad history SERVICE for operations"
	case "shutting_down":
		return "the server stops: try again when it is back"
	case "too_many_requests":
		return "wait a while"
	}
	return ""
}

// answer prints the answer: these lines of it, or with --json the document.
func (c *client) answer(raw []byte, lines ...string) {
	if c.json {
		c.document(raw)
		return
	}
	for _, l := range lines {
		printLine(c.out, "%s", l)
	}
}

// document prints one JSON document as it came, indented.
func (c *client) document(raw []byte) {
	var b bytes.Buffer
	if json.Indent(&b, bytes.TrimSpace(raw), "", "  ") != nil {
		c.log.note("the answer is no JSON")
		return
	}
	b.WriteByte('\n')
	c.out.Write(escaped(b.Bytes()))
}

// escaped writes what JSON allows raw in a string and a terminal obeys (C1 controls, direction
// marks) as an escape: the same document to every reader.
func escaped(raw []byte) []byte {
	var out []byte
	for _, r := range string(raw) {
		switch {
		case r < 0x7f || unicode.IsPrint(r):
			out = append(out, string(r)...)
		default:
			for _, u := range utf16.Encode([]rune{r}) {
				out = fmt.Appendf(out, `\u%04x`, u)
			}
		}
	}
	return out
}

// read gets one document into v.
func (c *client) read(ctx context.Context, path string, v any) ([]byte, error) {
	return c.call(ctx, http.MethodGet, path, nil, v, answerTime)
}

// decodeAnswer passes over fields it does not know: the server may be newer.
func decodeAnswer(raw []byte, v any) error {
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	return nil
}

// requestFlags are the flags of a command that submits.
type requestFlags struct {
	expect *int64
	key    string
	noWait bool
}

func (f *requestFlags) register(flags *flag.FlagSet) {
	flags.Func("expect", "go on only from `generation` N (default: the one read just before)", func(s string) error {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n < 0 {
			return errors.New("not a generation")
		}
		f.expect = &n
		return nil
	})
	flags.StringVar(&f.key, "key", "", "idempotency `key` of the request (default: a new one, printed)")
	flags.BoolVar(&f.noWait, "no-wait", false, "return once the operation is accepted")
}

func deployCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("deploy")
	c := newClient(fs, stdout, stderr)
	var f requestFlags
	f.register(fs)
	dry := fs.Bool("dry-run", false, "say what would happen, and change nothing")
	return newCommand(fs, "SERVICE IMAGE", "deploy an image and follow it to the end",
		"IMAGE is the enrolled repository and a digest: registry.example.org/apps/hello@sha256:…\n"+
			"Ctrl-C ends the watching only.",
		func(ctx context.Context, args []string) error {
			return c.deploy(ctx, args[0], args[1], f, *dry)
		})
}

func (c *client) deploy(ctx context.Context, service, image string, f requestFlags, dry bool) error {
	doing := "deploying " + service
	if f.expect == nil {
		var s wireService
		if _, err := c.read(ctx, "/v1/services/"+service, &s); err != nil {
			return c.explain(err, doing, service)
		}
		f.expect = &s.Generation
	}
	if dry {
		return c.dryRun(ctx, deployRequest{service, image, f.expect, cmp.Or(f.key, rand.Text())})
	}
	again := c.again(&f, "deploy", service, image)
	raw, op, err := c.submit(ctx, "/v1/deployments", deployRequest{service, image, f.expect, f.key})
	if err != nil {
		return c.unanswered(err, doing, service, again)
	}
	return c.finish(ctx, raw, op, f.noWait, deployedStatus)
}

// dryRun prints what a deployment would meet; a refusal that it would meet is its failure.
func (c *client) dryRun(ctx context.Context, req deployRequest) error {
	var d wireDryRun
	raw, err := c.call(ctx, http.MethodPost, "/v1/deployments?dry_run=true", req, &d, answerTime)
	if err != nil {
		return c.explain(err, "trying "+req.Service, req.Service)
	}
	c.answer(raw, dryRunLines(d)...)
	if !d.Accepted {
		return &commandError{status: exitRefused}
	}
	return nil
}

func dryRunLines(d wireDryRun) []string {
	var lines []string
	say := func(subject, format string, args ...any) {
		lines = append(lines, fmt.Sprintf("%-11s %s", subject, fmt.Sprintf(format, args...)))
	}
	say("service", "%s: the deployment %s", d.Service, choose(d.Accepted, "would be accepted", "would be refused"))
	if d.Current != nil {
		say("current", "generation %d, %s", d.Current.Generation, d.Current.Image)
	} else {
		say("current", "none: nothing was promoted yet")
	}
	say("candidate", "generation %d, %s", d.Generation, d.Candidate.Image)
	subject := "checks"
	for _, k := range d.Checks {
		text := k.Name + " " + k.Outcome
		if k.Code != "" {
			text += ": " + k.Code
		}
		if k.Detail != "" {
			text += ": " + k.Detail
		}
		say(subject, "%s", text)
		subject = ""
	}
	if f := d.FailedBefore; f != nil {
		say("before", "this digest ended %s (%s) in operation %s at %s", f.State, f.Code, f.OperationID, clockText(f.FinishedAt))
	}
	if t := d.Target; t != nil {
		say("target", "generation %d, %s", t.Generation, choose(t.Ready, "ready", "not ready"))
		for _, p := range t.Problems {
			say("", "%s: %s", p.Code, p.Summary)
		}
	} else {
		say("target", "none: a failure would leave nothing running")
	}
	if len(d.UnitChanges) == 0 {
		say("unit", "does not change")
	}
	subject = "unit"
	for _, u := range d.UnitChanges {
		say(subject, "[%s] %s= %s", u.Section, u.Key, u.Change)
		subject = ""
	}
	for l := range strings.Lines(d.UnitDiff) {
		lines = append(lines, strings.TrimSuffix(l, "\n"))
	}
	return lines
}

// again makes the key unless it is given, says how the request can be repeated, and returns that.
func (c *client) again(f *requestFlags, command ...string) string {
	made := f.key == ""
	if made {
		f.key = rand.Text()
	}
	again := c.command(append(command, "--expect", strconv.FormatInt(*f.expect, 10), "--key", f.key)...)
	if made {
		c.log.note("to repeat this very request: %s", again)
	}
	return again
}

// submit sends a request that begins or ends an operation. When the answer is lost it is sent again
// as it is: the server answers a key, or an end that was asked for, with the same operation.
func (c *client) submit(ctx context.Context, path string, in any) ([]byte, wireOperation, error) {
	var op wireOperation
	raw, err := c.insist(ctx, http.MethodPost, path, in, &op, answerTime)
	return raw, op, err
}

// unanswered explains the end of a submission: only a refusal says that nothing was accepted.
func (c *client) unanswered(err error, doing, service, again string) error {
	e := c.explain(err, doing, service)
	switch {
	case e.status == exitInterrupted:
		e.text, e.hint = doing+": interrupted before the answer, it may have been accepted", "to find out: "+again
	case e.status == exitUnreachable && c.reached.Load():
		e.text, e.hint = e.text+"; it may have been accepted", "to find out: "+again
	}
	return e
}

// finish says that the operation was accepted, follows it to its end, and says what became of it.
// status turns the end into the exit status.
func (c *client) finish(ctx context.Context, raw []byte, op wireOperation, noWait bool, status func(wireOperation) int) error {
	c.log.note("operation %s: %s generation %d, %s", op.ID, op.Service, op.Generation, shortDigest(op.Candidate.Digest))
	if noWait && !op.Terminal {
		c.answer(raw, op.ID)
		c.log.note("to watch it: %s", c.command("watch", op.ID))
		return nil
	}
	raw, op, err := c.follow(ctx, raw, op)
	if err != nil {
		return err
	}
	to := c.out
	if c.json {
		c.document(raw)
		to = c.log.w
	}
	for _, l := range outcomeLines(op) {
		printLine(to, "%s", l)
	}
	if s := status(op); s != 0 {
		return &commandError{status: s}
	}
	return nil
}

// follow shows an operation until it is terminal.
func (c *client) follow(ctx context.Context, raw []byte, op wireOperation) ([]byte, wireOperation, error) {
	defer c.log.clear()
	p := progress{screen: c.log}
	for {
		p.show(op, time.Now())
		if op.Terminal {
			return raw, op, nil
		}
		wait := 30
		if op.State == "probation" { // its restarts and its window change within the state
			wait = 1
		}
		asked, was := time.Now(), op.State
		path := fmt.Sprintf("/v1/operations/%s?wait=%d&after_state=%s", url.PathEscape(op.ID), wait, url.QueryEscape(was))
		var next wireOperation
		answer, err := c.insist(ctx, http.MethodGet, path, nil, &next, time.Duration(wait)*time.Second+answerTime)
		if err == nil {
			raw, op = answer, next
		}
		if err == nil && op.State == was && !pauseFor(ctx, pace-time.Since(asked)) {
			err = errStopped
		}
		if err != nil {
			c.log.clear()
			e := c.explain(err, "watching "+op.ID, op.Service)
			switch again := c.command("watch", op.ID); e.status {
			case exitInterrupted:
				e.text, e.hint = "stopped watching, the operation goes on", "to watch it again: "+again
			case exitUnreachable:
				e.hint = "to watch it again: " + again
			}
			return nil, op, e
		}
	}
}

// deployedStatus is the exit status of deploy and watch.
func deployedStatus(op wireOperation) int {
	switch op.State {
	case "promoted":
		return 0
	case "rolled_back":
		return exitRolledBack
	}
	return exitFailed
}

// endedStatus is the exit status of asking an operation to end.
func endedStatus(op wireOperation) int {
	f := op.Failure
	switch {
	case op.State == "rolled_back",
		op.State == "failed" && f != nil && f.Code == "requested",
		op.State == "failed" && f != nil && f.Code == "no_rollback_target" && f.Cause == "requested":
		return 0
	case op.State == "promoted": // the operation did well, the request did not
		return exitRefused
	}
	return exitFailed
}

func watchCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("watch")
	c := newClient(fs, stdout, stderr)
	return newCommand(fs, "OPERATION", "follow an operation to the end",
		"Ctrl-C ends the watching only.",
		func(ctx context.Context, args []string) error {
			raw, op, err := c.operation(ctx, args[0])
			if err != nil {
				return c.explain(err, "watching "+args[0], "")
			}
			return c.finish(ctx, raw, op, false, deployedStatus)
		})
}

func (c *client) operation(ctx context.Context, id string) ([]byte, wireOperation, error) {
	var op wireOperation
	raw, err := c.insist(ctx, http.MethodGet, "/v1/operations/"+id, nil, &op, answerTime)
	return raw, op, err
}

func rollbackCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("rollback")
	c := newClient(fs, stdout, stderr)
	var f requestFlags
	f.register(fs)
	return newCommand(fs, "SERVICE|OPERATION", "end the operation under way, or deploy the retained revision again",
		"Of a service: an operation under way is asked to end, else the retained revision is deployed.\n"+
			"With --expect or --key it is always the latter.",
		func(ctx context.Context, args []string) error {
			name, deployment := args[0], f.expect != nil || f.key != ""
			if operationID.MatchString(name) && !deployment {
				err := c.rollbackOperation(ctx, name, "", f)
				// A name of 26 characters is a service's as well. There was no such operation, so
				// nothing was done yet.
				if err != errNoOperation {
					return err
				}
			}
			if err := wantArgs("rollback", args, "SERVICE"); err != nil {
				return err
			}
			return c.rollbackService(ctx, name, deployment, f)
		})
}

var errNoOperation = errors.New("no such operation")

// rollbackOperation asks an operation to end.
func (c *client) rollbackOperation(ctx context.Context, id, service string, f requestFlags) error {
	raw, op, err := c.submit(ctx, "/v1/operations/"+id+"/rollback", nil)
	switch refusalCode(err) {
	case "not_found":
		if service == "" {
			return errNoOperation
		}
	case "not_rollbackable":
		// It has ended. If it was asked to before, the answer to that may be the one that was lost.
		if raw2, op2, err2 := c.operation(ctx, id); err2 == nil && op2.RollbackRequested {
			raw, op, err = raw2, op2, nil
		}
	}
	if err != nil {
		return c.unanswered(err, "ending operation "+id, service, c.command("rollback", id))
	}
	return c.finish(ctx, raw, op, f.noWait, endedStatus)
}

func refusalCode(err error) string {
	if r := (*refusal)(nil); errors.As(err, &r) {
		return r.Code
	}
	return ""
}

// rollbackService looks at the service once and sends what it saw, so that a promotion in between is
// refused by the server and never becomes another action.
func (c *client) rollbackService(ctx context.Context, service string, deployment bool, f requestFlags) error {
	doing := "rolling back " + service
	if f.expect == nil {
		var s wireService
		if _, err := c.read(ctx, "/v1/services/"+service, &s); err != nil {
			return c.explain(err, doing, service)
		}
		if s.ActiveOperation != nil && !deployment {
			return c.rollbackOperation(ctx, s.ActiveOperation.ID, service, f)
		}
		f.expect = &s.Generation
	}
	again := c.again(&f, "rollback", service)
	raw, op, err := c.submit(ctx, "/v1/services/"+service+"/rollback", rollbackRequest{f.expect, f.key})
	if err != nil {
		return c.unanswered(err, doing, service, again)
	}
	return c.finish(ctx, raw, op, f.noWait, deployedStatus)
}

func statusCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("status")
	c := newClient(fs, stdout, stderr)
	return newCommand(fs, "[SERVICE]", "show the services, or one of them", "",
		func(ctx context.Context, args []string) error {
			if len(args) == 0 {
				return c.statusAll(ctx)
			}
			return c.status(ctx, args[0])
		})
}

func (c *client) statusAll(ctx context.Context) error {
	var all wireServices
	raw, err := c.read(ctx, "/v1/services", &all)
	if err != nil {
		return c.explain(err, "reading the services", "")
	}
	if c.json {
		c.document(raw)
		return nil
	}
	t := newTable(c.out, "SERVICE", "GENERATION", "DIGEST", "STATE", "READY", "OPERATION", "ROLLBACK")
	for _, s := range all.Services {
		digest, operation, rollback := "-", "-", "-"
		if s.Current != nil {
			digest = shortDigest(s.Current.Digest)
		}
		if op := s.ActiveOperation; op != nil {
			operation = op.State + " " + op.ID
		}
		if s.Rollback != nil {
			rollback = choose(s.Rollback.Ready, "ready", "not ready")
		}
		generation := choose(s.Problem == "", strconv.FormatInt(s.Generation, 10), "-")
		t.row(s.Service, generation, digest, cmp.Or(s.Health.State, "unknown"), choose(s.Health.Ready, "yes", "no"), operation, rollback)
	}
	t.flush()
	for _, s := range all.Services {
		switch {
		case s.Problem != "":
			printLine(c.out, "%s: state unavailable: %s", s.Service, s.Problem)
		case !s.Enrollment.Valid:
			printLine(c.out, "%s: enrollment invalid: %s", s.Service, cmp.Or(s.Enrollment.Problem, "no reason given"))
		}
		if s.Held != nil {
			printLine(c.out, "%s: held: still there: %s", s.Service, strings.Join(s.Held.Remains, ", "))
		}
		if p := s.Suspended; p != nil {
			printLine(c.out, "%s: suspended since %s%s", s.Service, clockText(p.Since), stillThereText(p.Remains))
		}
		if p := s.Retired; p != nil {
			printLine(c.out, "%s: %s since %s%s", s.Service, choose(p.Done, "retired", "being retired"), clockText(p.Since), stillThereText(p.Remains))
		}
		if p := s.Barrier; p != nil {
			printLine(c.out, "%s: closed by operation %s until it is acknowledged", s.Service, p.OperationID)
		}
	}
	return nil
}

func (c *client) status(ctx context.Context, service string) error {
	var s wireService
	raw, err := c.read(ctx, "/v1/services/"+service, &s)
	if err != nil {
		return c.explain(err, "reading "+service, service)
	}
	c.answer(raw, statusLines(s)...)
	return nil
}

// statusLines is the view of one service: a word in the left column for each subject.
func statusLines(s wireService) []string {
	var lines []string
	say := func(subject, format string, args ...any) {
		lines = append(lines, fmt.Sprintf("%-11s %s", subject, fmt.Sprintf(format, args...)))
	}
	say("service", "%s%s", s.Service, choose(s.Problem == "", fmt.Sprintf(", generation %d", s.Generation), ""))
	switch {
	case s.Problem != "": // then an empty field says nothing
		say("problem", "state unavailable: %s", s.Problem)
	case s.Current == nil:
		say("current", "none: nothing was promoted yet")
	default:
		say("current", "generation %d, promoted %s", s.Current.Generation, clockText(s.Current.PromotedAt))
		say("", "%s", s.Current.Image)
		if !s.Installed && s.Suspended == nil {
			say("", "its promoted unit is not in place yet: it may not start at boot")
		}
	}

	h := s.Health
	text := cmp.Or(h.State, "unknown")
	if h.State == "running" || h.Ready {
		text += ", " + choose(h.Ready, "ready", "not ready")
	}
	if s.Current != nil {
		text += fmt.Sprintf(", %s since promotion", countText(h.RestartsSincePromotion, "restart"))
	}
	if h.ObservedAt != nil {
		text += ", seen " + clockText(*h.ObservedAt)
	}
	say("health", "%s", text)
	if h.Digest != "" && !h.MatchesCurrent {
		say("", "what runs is not the current revision: %s", h.Digest)
	}

	if r := s.Rollback; r == nil && s.Problem == "" {
		say("rollback", "none retained")
	} else if r != nil {
		say("rollback", "generation %d, %s", r.Generation, choose(r.Ready, "ready", "not ready"))
		say("", "%s", r.Image)
		for _, p := range r.Problems {
			say("", "%s: %s", p.Code, p.Summary)
		}
	}

	if op := s.ActiveOperation; op != nil {
		say("operation", "%s: %s, generation %d, by %s", op.ID, op.State, op.Generation, op.RequestedBy)
		say("", "%s", op.Candidate.Image)
	}
	if op := s.LastOperation; op != nil && (s.ActiveOperation == nil || s.ActiveOperation.ID != op.ID) {
		say("last", "%s: %s, generation %d, by %s", op.ID, op.State, op.Generation, op.RequestedBy)
		if f := op.Failure; f != nil {
			say("", "%s", failureText(*f))
			if f.Hint != "" {
				say("", "hint: %s", f.Hint)
			}
		}
	}
	if s.Held != nil {
		say("held", "since %s, by operation %s", clockText(s.Held.Since), s.Held.OperationID)
		for _, remains := range s.Held.Remains {
			say("", "still there: %s", remains)
		}
	}
	if p := s.Suspended; p != nil {
		say("suspended", "since %s, by %s%s", clockText(p.Since), p.By, stillThereText(p.Remains))
	}
	if p := s.Retired; p != nil {
		say("retired", "%s%s, by %s%s", choose(p.Done, "", "under way, "), clockText(p.Since), p.By, stillThereText(p.Remains))
	}
	if p := s.Barrier; p != nil {
		say("barrier", "since %s, by operation %s: no deployment is taken until it is acknowledged", clockText(p.RaisedAt), p.OperationID)
	}
	if s.Enrollment.Valid {
		say("enrollment", "valid, %s", s.Enrollment.Repository)
		if s.Enrollment.DiffersFromCurrent {
			say("", "it changed since the current revision: the next deployment takes it up")
		}
	} else {
		say("enrollment", "invalid: %s", cmp.Or(s.Enrollment.Problem, "no reason given"))
	}
	subject := "actions"
	for _, a := range s.Actions {
		reason := ""
		if !a.Enabled && a.Reason != "" {
			reason = ": " + a.Reason
		}
		say(subject, "%s %s%s", a.Name, choose(a.Enabled, "can be done", "cannot be done"), reason)
		subject = ""
	}
	return lines
}

func stillThereText(remains []string) string {
	if len(remains) == 0 {
		return ""
	}
	return "; still there: " + strings.Join(remains, ", ")
}

func suspendCmd(stdout, stderr io.Writer) *ffcli.Command {
	return askCmd(stdout, stderr, "suspend", "stop a service and keep it down over reboots", "suspending",
		func(s wireService) (string, bool) {
			if s.Suspended == nil {
				return s.Service + " was resumed meanwhile", true
			}
			return "suspended: " + s.Service + " is stopped and stays down", s.Health.State == "stopped"
		})
}

func resumeCmd(stdout, stderr io.Writer) *ffcli.Command {
	return askCmd(stdout, stderr, "resume", "start a suspended service again", "resuming",
		func(s wireService) (string, bool) {
			if s.Suspended != nil {
				return s.Service + " was suspended meanwhile", true
			}
			return "resumed: " + s.Service + " is ready", s.Health.Ready
		})
}

func retireCmd(stdout, stderr io.Writer) *ffcli.Command {
	return askCmd(stdout, stderr, "retire", "end a service whose enrollment is gone", "retiring",
		func(s wireService) (string, bool) {
			return "retired: " + s.Service + " is gone, its records stay", s.Retired != nil && s.Retired.Done
		})
}

// askCmd is a command that asks something of a service and waits until it is done. done tells that, and
// what is said then.
func askCmd(stdout, stderr io.Writer, name, help, doing string, done func(s wireService) (string, bool)) *ffcli.Command {
	fs := newFlags(name)
	c := localClient(fs, stdout, stderr)
	noWait := fs.Bool("no-wait", false, "return once it is accepted")
	return newCommand(fs, "SERVICE", help,
		"Ctrl-C ends the waiting only.",
		func(ctx context.Context, args []string) error {
			return c.ask(ctx, args[0], name, doing+" "+args[0], *noWait, done)
		})
}

// ask may be repeated as it is: what was asked for already changes nothing.
func (c *client) ask(ctx context.Context, service, name, doing string, noWait bool, done func(s wireService) (string, bool)) error {
	var in any
	if name == "retire" {
		var s wireService
		if _, err := c.read(ctx, "/v1/services/"+service, &s); err != nil {
			return c.explain(err, doing, service)
		}
		in = retireRequest{&s.Generation}
	}
	var s wireService
	raw, err := c.insist(ctx, http.MethodPost, "/v1/services/"+service+"/"+name, in, &s, answerTime)
	for said := ""; ; {
		if err != nil {
			e := c.explain(err, doing, service)
			if e.status == exitInterrupted {
				e.text, e.hint = "stopped waiting, it goes on", "to look: "+c.command("status", service)
			}
			return e
		}
		text, ok := done(s)
		if ok || noWait {
			c.answer(raw, choose(ok, text, doing+" goes on"))
			return nil
		}
		if name == "resume" && s.Installed && s.Health.State == "failed" {
			return &commandError{exitRefused, doing + ": it was started and failed", "see " + c.command("status", service)}
		}
		now := "health is " + cmp.Or(s.Health.State, "unknown")
		if p := s.Suspended; p != nil {
			now += stillThereText(p.Remains)
		}
		if p := s.Retired; p != nil {
			now += stillThereText(p.Remains)
		}
		if now != said {
			said = now
			c.log.note("%s: %s", doing, now)
		}
		if !pauseFor(ctx, time.Second) {
			err = errStopped
			continue
		}
		s = wireService{}
		raw, err = c.insist(ctx, http.MethodGet, "/v1/services/"+service, nil, &s, answerTime)
	}
}

func reconcileCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("reconcile")
	c := newClient(fs, stdout, stderr)
	return newCommand(fs, "SERVICE [OPERATION]", "acknowledge an operation that went wrong, and lift its barrier",
		"Without OPERATION it is the one that the service names just before.",
		func(ctx context.Context, args []string) error {
			id := ""
			if len(args) > 1 {
				id = args[1]
			}
			return c.reconcile(ctx, args[0], id)
		})
}

func (c *client) reconcile(ctx context.Context, service, id string) error {
	doing := "reconciling " + service
	if id == "" {
		var s wireService
		raw, err := c.read(ctx, "/v1/services/"+service, &s)
		if err != nil {
			return c.explain(err, doing, service)
		}
		if s.Barrier == nil {
			c.answer(raw, service+" has no barrier")
			return nil
		}
		id = s.Barrier.OperationID
	}
	raw, err := c.insist(ctx, http.MethodPost, "/v1/services/"+service+"/reconcile", reconcileRequest{id}, nil, answerTime)
	if err != nil {
		return c.explain(err, doing, service)
	}
	c.answer(raw, fmt.Sprintf("reconciled: operation %s is acknowledged, %s takes deployments again", id, service))
	return nil
}

func logCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("log")
	c := newClient(fs, stdout, stderr)
	var follow bool
	fs.BoolVar(&follow, "follow", false, "go on until the operation has ended")
	fs.BoolVar(&follow, "f", false, "as --follow")
	return newCommand(fs, "OPERATION", "print what an operation did",
		"With --json each line is a JSON document of its own.",
		func(ctx context.Context, args []string) error {
			if err := c.printLog(ctx, args[0], follow); err != nil {
				return c.explain(err, "reading the log of "+args[0], "")
			}
			return nil
		})
}

func (c *client) printLog(ctx context.Context, id string, follow bool) error {
	var last int64
	for follow {
		err := c.streamLog(ctx, id, true, &last)
		if err != nil && !errors.As(err, new(lostError)) && refusalCode(err) != "shutting_down" {
			return err
		}
		// A stream ends with the operation, and with a server that stops: only the operation tells
		// which it was.
		_, op, err := c.operation(ctx, id)
		if err != nil {
			return err
		}
		follow = !op.Terminal
		if follow && !pauseFor(ctx, pace) {
			return errStopped
		}
	}
	return c.streamLog(ctx, id, false, &last)
}

// streamLog prints the lines after the last one printed.
func (c *client) streamLog(ctx context.Context, id string, follow bool, last *int64) error {
	path := "/v1/operations/" + id + "/log"
	if follow {
		path += "?follow=true"
	}
	resp, err := c.open(ctx, http.MethodGet, path, nil)
	if err != nil {
		if ctx.Err() != nil {
			return errStopped
		}
		return err
	}
	defer resp.Body.Close()
	for r := bufio.NewReader(resp.Body); ; {
		raw, err := r.ReadBytes('\n')
		switch {
		case ctx.Err() != nil:
			return errStopped
		case err == io.EOF && len(raw) == 0:
			return nil
		case err != nil:
			return lostError{err}
		}
		var l wireLogLine
		if err := decodeAnswer(raw, &l); err != nil {
			return err
		}
		if l.Seq <= *last {
			continue
		}
		*last = l.Seq
		if c.json {
			c.out.Write(escaped(raw))
		} else {
			printLine(c.out, "%s  %-12s  %s", clockText(l.At), l.State, l.Text)
		}
	}
}

func eventsCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("events")
	c := newClient(fs, stdout, stderr)
	after := fs.Int64("after", 0, "those after this `cursor`")
	var follow bool
	fs.BoolVar(&follow, "follow", false, "go on with those to come")
	fs.BoolVar(&follow, "f", false, "as --follow")
	return newCommand(fs, "[SERVICE]", "print what happened to a service, or to Toad itself",
		"With --json each line is a JSON document of its own.",
		func(ctx context.Context, args []string) error {
			service, doing := "", "reading toad's own events"
			if len(args) > 0 {
				service, doing = args[0], "reading the events of "+args[0]
			}
			if err := c.printEvents(ctx, service, *after, follow); err != nil {
				return c.explain(err, doing, service)
			}
			return nil
		})
}

// printEvents prints the events after a cursor, page by page, and with follow those to come.
func (c *client) printEvents(ctx context.Context, service string, after int64, follow bool) error {
	q := url.Values{}
	if service != "" {
		q.Set("service", service)
	}
	const wait = 30 * time.Second
	for {
		asked := time.Now()
		q.Set("after", strconv.FormatInt(after, 10))
		if follow {
			q.Set("wait", strconv.Itoa(int(wait.Seconds())))
		}
		var page struct {
			Events []json.RawMessage `json:"events"`
			Next   int64             `json:"next_cursor"`
		}
		if _, err := c.insist(ctx, http.MethodGet, "/v1/events?"+q.Encode(), nil, &page, wait+answerTime); err != nil {
			return err
		}
		for _, raw := range page.Events {
			var e wireEvent
			if err := decodeAnswer(raw, &e); err != nil {
				return err
			}
			if c.json {
				var line bytes.Buffer
				if err := json.Compact(&line, raw); err != nil {
					return err
				}
				line.WriteByte('\n')
				c.out.Write(escaped(line.Bytes()))
				continue
			}
			times := ""
			if e.Count > 1 {
				times = fmt.Sprintf(" (%d times)", e.Count)
			}
			printLine(c.out, "%6d  %s  %-18s  %-8s  %s  %s%s", e.Cursor, clockText(e.At), e.Type, e.Actor, cmp.Or(e.OperationID, "-"), e.Detail, times)
		}
		after = page.Next
		if len(page.Events) > 0 {
			continue
		}
		if !follow {
			return nil
		}
		if !pauseFor(ctx, pace-time.Since(asked)) { // a server that stops answers at once
			return errStopped
		}
	}
}

func outputCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("output")
	c := localClient(fs, stdout, stderr)
	return newCommand(fs, "OPERATION", "print what a rolled back candidate wrote itself",
		"On a terminal control characters are dropped; elsewhere it comes as it was written.",
		func(ctx context.Context, args []string) error {
			raw, err := c.call(ctx, http.MethodGet, "/v1/operations/"+args[0]+"/output", nil, nil, answerTime)
			if err != nil {
				return c.explain(err, "reading the output of "+args[0], "")
			}
			switch {
			case c.json:
				doc, err := json.Marshal(map[string]string{"operation_id": args[0], "output": string(raw)})
				if err != nil {
					return err
				}
				c.document(doc)
			case isTerminal(stdout):
				printText(stdout, raw)
			default:
				stdout.Write(raw)
			}
			return nil
		})
}

// printText prints what somebody else wrote line by line.
func printText(w io.Writer, text []byte) {
	for line := range strings.Lines(string(text)) {
		printLine(w, "%s", strings.TrimRight(line, "\r\n"))
	}
}

func tokenCmd(stdout, stderr io.Writer) *ffcli.Command {
	return &ffcli.Command{
		Name:       "token",
		ShortUsage: "toad token issue|list|revoke [ARGUMENTS] [FLAGS]",
		ShortHelp:  "issue, list and revoke the tokens of the API for programs",
		FlagSet:    newFlags("token"),
		Subcommands: []*ffcli.Command{
			tokenIssueCmd(stdout, stderr),
			tokenListCmd(stdout, stderr),
			tokenRevokeCmd(stdout, stderr),
		},
		Exec: func(_ context.Context, args []string) error {
			if len(args) == 0 {
				return usageError("token: issue, list or revoke is missing", "toad token -h shows the usage")
			}
			return usageError("token: unknown command: "+args[0], "toad token -h shows the usage")
		},
	}
}

func tokenIssueCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("token issue")
	c := localClient(fs, stdout, stderr)
	verbs := fs.String("verbs", "read", "what it allows, of `VERBS` read, deploy, rollback")
	label := fs.String("label", "", "a `text` that says what it is for")
	expires := fs.Duration("expires", 0, "how long it is valid, a `duration` like 720h; 0s: until it is revoked")
	return newCommand(fs, "SERVICE --label TEXT", "issue a token for one service",
		"The token is printed once, alone on standard output. Toad keeps only its hash.",
		func(ctx context.Context, args []string) error {
			req := tokenRequest{Service: args[0], Label: *label, Verbs: splitNames(*verbs)}
			if *expires != 0 {
				if *expires < time.Second {
					return usageError("token issue: --expires must be a second at least", "--expires 720h is thirty days")
				}
				seconds := int64(*expires / time.Second)
				req.ExpiresInSeconds = &seconds
			}
			return c.issueToken(ctx, req)
		})
}

func (c *client) issueToken(ctx context.Context, req tokenRequest) error {
	var t wireIssued
	raw, err := c.call(ctx, http.MethodPost, "/v1/tokens", req, &t, answerTime)
	if err != nil {
		e := c.explain(err, "issuing a token for "+req.Service, req.Service)
		if e.status != exitRefused && c.reached.Load() {
			e.text, e.hint = e.text+"; it may have been issued, and nobody has its secret", "revoke it if it is there: "+c.command("token", "list", req.Service)
		}
		return e
	}
	c.answer(raw, t.Token)
	until := "until it is revoked"
	if t.ExpiresAt != nil {
		until = "until " + clockText(*t.ExpiresAt)
	}
	c.log.note("token %s for %s: %s, valid %s", t.ID, t.Service, strings.Join(t.Verbs, ", "), until)
	c.log.note("it is shown this once; to end it: %s", c.command("token", "revoke", t.ID))
	return nil
}

func tokenListCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("token list")
	c := localClient(fs, stdout, stderr)
	return newCommand(fs, "[SERVICE]", "list the tokens, or those of a service", "",
		func(ctx context.Context, args []string) error {
			path := "/v1/tokens"
			if len(args) > 0 {
				path += "?service=" + args[0]
			}
			return c.listTokens(ctx, path)
		})
}

func (c *client) listTokens(ctx context.Context, path string) error {
	var list wireTokens
	raw, err := c.read(ctx, path, &list)
	if err != nil {
		return c.explain(err, "reading the tokens", "")
	}
	if c.json {
		c.document(raw)
		return nil
	}
	t := newTable(c.out, "TOKEN", "SERVICE", "VERBS", "ISSUED", "EXPIRES", "LAST USED", "STATE", "LABEL")
	at := func(w *wireTime) string {
		if w == nil {
			return "-"
		}
		return clockText(*w)
	}
	for _, k := range list.Tokens {
		state := choose(k.Valid, "valid", "expired")
		if k.RevokedAt != nil {
			state = "revoked"
		}
		t.row(k.ID, k.Service, strings.Join(k.Verbs, ","), clockText(k.IssuedAt), at(k.ExpiresAt), at(k.LastUsedAt), state, k.Label)
	}
	t.flush()
	return nil
}

func tokenRevokeCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("token revoke")
	c := localClient(fs, stdout, stderr)
	return newCommand(fs, "TOKEN", "end a token, by its id", "",
		func(ctx context.Context, args []string) error {
			if !tokenID.MatchString(args[0]) { // it may be the token itself: not to be repeated
				return usageError("token revoke: this is not a token's id", "toad token list shows them")
			}
			return c.revokeToken(ctx, args[0])
		})
}

// revokeToken asks until it is answered: a token that is revoked already is no other answer.
func (c *client) revokeToken(ctx context.Context, id string) error {
	var t wireToken
	raw, err := c.insist(ctx, http.MethodDelete, "/v1/tokens/"+id, nil, &t, answerTime)
	if err != nil {
		e := c.explain(err, "revoking "+id, "")
		if e.status != exitRefused && c.reached.Load() {
			e.hint = "it may not be durable yet; revoke it again: " + c.command("token", "revoke", id)
		}
		return e
	}
	c.answer(raw, fmt.Sprintf("token %s of %s is revoked", t.ID, t.Service))
	return nil
}

func historyCmd(stdout, stderr io.Writer) *ffcli.Command {
	fs := newFlags("history")
	c := newClient(fs, stdout, stderr)
	limit := fs.Int("limit", 20, "at most `N` operations")
	before := fs.String("before", "", "those before this `operation`")
	return newCommand(fs, "SERVICE", "list a service's operations, newest first", "",
		func(ctx context.Context, args []string) error {
			return c.history(ctx, args[0], *limit, *before)
		})
}

func (c *client) history(ctx context.Context, service string, limit int, before string) error {
	q := url.Values{"limit": {strconv.Itoa(limit)}}
	if before != "" {
		q.Set("before", before)
	}
	var page wireOperations
	raw, err := c.read(ctx, "/v1/services/"+service+"/operations?"+q.Encode(), &page)
	if err != nil {
		return c.explain(err, "reading the history of "+service, service)
	}
	if c.json {
		c.document(raw)
		return nil
	}
	t := newTable(c.out, "WHEN", "OPERATION", "GENERATION", "DIGEST", "WHO", "OUTCOME", "WHY")
	for _, op := range page.Operations {
		why := "-"
		if op.Failure != nil {
			why = failureText(*op.Failure)
		}
		t.row(clockText(op.CreatedAt), op.ID, strconv.FormatInt(op.Generation, 10), shortDigest(op.Candidate.Digest),
			op.RequestedBy, choose(op.Terminal, op.State, "under way: "+op.State), why)
	}
	t.flush()
	if page.Next != "" {
		c.log.note("older ones: %s", c.command("history", service, "--limit", strconv.Itoa(limit), "--before", page.Next))
	}
	return nil
}

// Printing. The rules:
//
//   - the answer goes to standard output, progress, notes and errors to standard error;
//   - a line is a whole sentence in lower case without a full stop, and begins with its subject;
//   - an error begins "toad: ", what to do about it follows in a line "hint: ";
//   - nothing is coloured, and only the bar of the stability window is ever redrawn, on a terminal;
//   - times are the server's, in UTC; digests are cut to twelve digits where the whole is in --json.

// printLine prints one line, whatever is in it: control characters and direction marks are dropped.
func printLine(w io.Writer, format string, args ...any) {
	io.WriteString(w, printable(fmt.Sprintf(format, args...))+"\n")
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsPrint(r):
			return r
		case unicode.IsSpace(r):
			return ' '
		}
		return -1
	}, s)
}

// table aligns columns; a cell is as printable as a line.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, heads ...string) table {
	t := table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.row(heads...)
	return t
}

func (t table) row(cells ...string) {
	for i, cell := range cells {
		if i > 0 {
			io.WriteString(t.w, "\t")
		}
		io.WriteString(t.w, printable(cell))
	}
	io.WriteString(t.w, "\n")
}

func (t table) flush() { t.w.Flush() }

func clockText(t wireTime) string { return time.Time(t).UTC().Format("2006-01-02 15:04:05Z") }

func shortDigest(digest string) string {
	algorithm, hex, ok := strings.Cut(digest, ":")
	if !ok || len(hex) <= 12 {
		return digest
	}
	return algorithm + ":" + hex[:12]
}

func choose(ok bool, yes, no string) string {
	if ok {
		return yes
	}
	return no
}

func countText(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func failureText(f failure) string {
	text := f.Code + ": " + f.Summary
	if f.Cause != "" {
		text += "; cause: " + f.Cause
	}
	return text
}

// outcomeLines says how an operation ended.
func outcomeLines(op wireOperation) []string {
	candidate := fmt.Sprintf("%s generation %d, %s", op.Service, op.Generation, shortDigest(op.Candidate.Digest))
	var text string
	switch {
	case op.State == "promoted":
		text = "promoted: " + candidate
	case op.State == "rolled_back" && op.Previous != nil:
		text = fmt.Sprintf("rolled back: %s is at generation %d again, %s", op.Service, op.Previous.Generation, shortDigest(op.Previous.Digest))
	case op.State == "rolled_back":
		text = "rolled back: " + candidate
	case op.Failure != nil && op.Failure.Code == "requested":
		text = "cancelled: " + candidate
	default:
		text = "failed: " + candidate
	}
	if op.Failure == nil {
		return []string{text}
	}
	lines := []string{text + ": " + failureText(*op.Failure)}
	if op.Failure.Hint != "" {
		lines = append(lines, "hint: "+op.Failure.Hint)
	}
	return lines
}

// screen is standard error. On a terminal its last line may be a bar that is drawn over.
type screen struct {
	w     io.Writer
	live  bool
	width func() int
	drawn string
}

func newScreen(w io.Writer) *screen {
	return &screen{w: w, live: isTerminal(w) && os.Getenv("TERM") != "dumb", width: func() int { return terminalWidth(w) }}
}

func (s *screen) note(format string, args ...any) {
	s.clear()
	printLine(s.w, format, args...)
}

func (s *screen) draw(bar string) {
	if bar = printable(bar); bar != s.drawn {
		io.WriteString(s.w, "\r"+bar+"\x1b[K")
		s.drawn = bar
	}
}

func (s *screen) clear() {
	if s.drawn != "" {
		io.WriteString(s.w, "\r\x1b[K")
		s.drawn = ""
	}
}

// progress shows one operation's way: a line for each change, whichever answer brought it.
type progress struct {
	screen    *screen
	shown     int // of the timeline
	restarts  int
	requested bool
}

func (p *progress) show(op wireOperation, now time.Time) {
	note := func(at wireTime, state, text string) { p.screen.note("%s  %-12s  %s", clockText(at), state, text) }
	if p.shown > 0 { // what happened before the watching began is not told as new
		if op.Restarts > p.restarts {
			note(op.UpdatedAt, op.State, fmt.Sprintf("%s, %d allowed", countText(op.Restarts, "restart"), op.RestartBudget))
		}
		if op.RollbackRequested && !p.requested {
			note(op.UpdatedAt, op.State, "asked to end")
		}
	}
	p.restarts, p.requested = op.Restarts, op.RollbackRequested
	for ; p.shown < len(op.Timeline); p.shown++ {
		if t := op.Timeline[p.shown]; stateText(op, t.State) != "" {
			note(t.At, t.State, stateText(op, t.State))
		}
	}
	if p.screen.live && op.State == "probation" {
		p.screen.draw(probationBar(op, now, p.screen.width()))
	}
}

// stateText says what is done in a state; nothing of a terminal one, which the outcome tells.
func stateText(op wireOperation, state string) string {
	switch state {
	case "preparing":
		return "fetching and checking " + shortDigest(op.Candidate.Digest)
	case "activating":
		return choose(op.Previous != nil, "stopping the running instance, starting the candidate", "starting the candidate")
	case "probation":
		return fmt.Sprintf("to be ready for %s without a break, %s allowed", spanText(op.StabilityWindowSeconds), countText(op.RestartBudget, "restart"))
	case "promoting":
		return "looking once more, then committing"
	case "rolling_back":
		if op.Previous != nil {
			return fmt.Sprintf("going back to generation %d", op.Previous.Generation)
		}
		return "stopping the candidate, there is nothing to go back to"
	}
	return ""
}

func spanText(seconds float64) string {
	return time.Duration(max(0, seconds) * float64(time.Second)).Truncate(time.Second).String()
}

// probationBar draws the stability window in less than width columns, so that no line wraps. What
// does not fit is left out: the bar first, then the end of the text.
func probationBar(op wireOperation, now time.Time, width int) string {
	text := fmt.Sprintf("%s of %s ready, %d of %d restarts", spanText(op.ReadyForSeconds), spanText(op.StabilityWindowSeconds), op.Restarts, op.RestartBudget)
	if op.DeadlineAt != nil {
		text += fmt.Sprintf(", %s left", spanText(time.Time(*op.DeadlineAt).Sub(now).Seconds()))
	}
	cells := min(width-1-len("probation [] ")-len(text), 40)
	if cells < 8 {
		text = "probation " + text
		return text[:min(len(text), max(0, width-1))]
	}
	full := 0
	if op.StabilityWindowSeconds > 0 {
		full = int(float64(cells) * max(0, min(1, op.ReadyForSeconds/op.StabilityWindowSeconds)))
	}
	return "probation [" + strings.Repeat("#", full) + strings.Repeat("-", cells-full) + "] " + text
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func terminalWidth(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 {
			return int(size.Col)
		}
	}
	return 80
}
