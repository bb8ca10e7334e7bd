package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// apiWorld is a daemon on the in-memory host, spoken to through its handler: the services hello and
// other are enrolled, and broken is not rightly.
type apiWorld struct {
	t       *testing.T
	h       *fakeHost
	d       *daemon
	handler http.Handler
	dir     string // the data directory

	enrollment string
	cancel     context.CancelFunc
	who        caller
	denied     *apiError // every request is answered so
}

func inAPI(t *testing.T, f func(t *testing.T, w *apiWorld)) {
	_, err := theDescription() // outside of the bubble
	must(t, err)
	synctest.Test(t, func(t *testing.T) {
		w := &apiWorld{t: t, h: newFakeHost(t), dir: filepath.Join(t.TempDir(), "data"), enrollment: t.TempDir()}
		must(t, os.Mkdir(w.dir, 0o700))
		w.h.data = w.dir
		for _, name := range []string{"hello", "other", "broken"} {
			en := testEnrollment(name)
			en.Repository = "registry.example.org/apps/" + name
			b, err := json.Marshal(en.enrollment)
			must(t, err)
			if name == "broken" {
				b = []byte(strings.Replace(string(b), `"version":1`, `"version":1,"surprise":true`, 1))
			}
			must(t, os.WriteFile(filepath.Join(w.enrollment, name+".json"), b, 0o600))
			must(t, os.WriteFile(filepath.Join(w.enrollment, name+".container"), en.Template, 0o600))
		}
		w.begin()
		f(t, w)
		w.end()
	})
}

// begin is the start of Toad.
func (w *apiWorld) begin() {
	data, err := openData(w.dir, w.h.quadlets)
	must(w.t, err)
	var ctx context.Context
	ctx, w.cancel = context.WithCancel(context.Background())
	w.d = &daemon{data: data, host: w.h.host(), log: slog.New(slog.NewTextHandler(testWriter{w.t}, nil)), stopping: make(chan struct{}), ctx: ctx, services: map[string]*service{}}
	w.d.enrollments = newEnrollments(w.enrollment, func() enrollOptions {
		return enrollOptions{quadlets: w.h.quadlets, claims: w.d.claims(), forbiddenPaths: []string{w.dir}}
	})
	w.d.refresh()
	w.d.wg.Go(func() { data.own.tally.run(ctx, func() error { return data.own.write() }) })
	local, remote := w.d.handler(), w.d.mux(func(rt route) bool { return rt.verb != "" })
	w.handler = described(w.t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		r = r.WithContext(context.WithValue(r.Context(), callerKey{}, w.who))
		if w.denied != nil {
			w.d.writeError(rw, r, w.denied)
			return
		}
		if w.who.remote {
			w.d.answer(remote, newReply(rw, r), r)
			return
		}
		local.ServeHTTP(rw, r)
	}))
	synctest.Wait()
}

// end is the end of Toad.
func (w *apiWorld) end() {
	w.cancel()
	w.d.wg.Wait()
	w.d.data.close()
}

// apiAnswer is what came back: the body as it is, and as a problem.
type apiAnswer struct {
	status int
	header http.Header
	body   string
	problem
}

func (w *apiWorld) do(method, path, body string, header ...string) apiAnswer {
	w.t.Helper()
	r, err := http.NewRequest(method, "http://toad"+path, strings.NewReader(body))
	must(w.t, err)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	rec := httptest.NewRecorder()
	w.handler.ServeHTTP(rec, r)
	a := apiAnswer{status: rec.Code, header: rec.Header(), body: rec.Body.String()}
	if rec.Code >= 300 {
		if err := json.Unmarshal(rec.Body.Bytes(), &a.problem); err != nil {
			w.t.Errorf("%s %s: status %d with a body that is no problem: %q", method, path, rec.Code, a.body)
		}
		if ct := rec.Header().Get("Content-Type"); ct != "application/problem+json" {
			w.t.Errorf("%s %s: Content-Type %q", method, path, ct)
		}
		if a.Status != rec.Code || a.Title == "" || a.Detail == "" {
			w.t.Errorf("%s %s: status %d with the problem %+v", method, path, rec.Code, a.problem)
		}
	}
	return a
}

func (w *apiWorld) refused(what string, a apiAnswer, status int, code, field string) {
	w.t.Helper()
	if a.status != status || a.Code != code || a.Field != field {
		w.t.Errorf("%s: status %d, code %q, field %q (%s), want %d, %q, %q", what, a.status, a.Code, a.Field, a.Detail, status, code, field)
	}
}

// state is everything that a request could have changed but for events: each file, and each mutation of
// the host.
func (w *apiWorld) state() string {
	var b strings.Builder
	for _, root := range []string{w.dir, w.h.quadlets} {
		must(w.t, filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			switch r := (&record{}); filepath.Base(path) {
			case "events.jsonl", "service.json.prev", "events.head.json", "events.head.json.prev":
				return err
			case "service.json": // less what the event of a refusal changes
				must(w.t, readRecord(path, r))
				if r.Generation == 0 {
					return nil
				}
				r.EventHead, r.Events, r.UpdatedAt = eventHead{}, nil, time.Time{}
				text, err = encodeRecord(r)
			}
			fmt.Fprintf(&b, "%s %x\n", path, sha(text))
			return err
		}))
	}
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	fmt.Fprintln(&b, w.h.mutations)
	return b.String()
}

func deployBody(service, image string, expected int64, key string) string {
	b, _ := json.Marshal(deployRequest{service, image, &expected, key})
	return string(b)
}

func (w *apiWorld) push(service, name string, a app) string {
	return w.h.push("registry.example.org/apps/"+service, name, a)
}

// deploy submits and returns the accepted operation.
func (w *apiWorld) deploy(service, image string, expected int64, key string) wireOperation {
	w.t.Helper()
	a := w.do("POST", "/v1/deployments", deployBody(service, image, expected, key))
	if a.status != 202 {
		w.t.Fatalf("status %d: %s", a.status, a.body)
	}
	return w.operation(a)
}

func (w *apiWorld) operation(a apiAnswer) (op wireOperation) {
	w.t.Helper()
	if err := json.Unmarshal([]byte(a.body), &op); err != nil || a.status >= 300 {
		w.t.Fatalf("status %d: %s", a.status, a.body)
	}
	return op
}

// await follows an operation to that state, or to its end.
func (w *apiWorld) await(id, state string) wireOperation {
	w.t.Helper()
	op := w.operation(w.do("GET", "/v1/operations/"+id, ""))
	for !op.Terminal && op.State != state {
		op = w.operation(w.do("GET", "/v1/operations/"+id+"?wait=60&after_state="+op.State, ""))
	}
	if state != "" && op.State != state {
		w.t.Fatalf("operation became %s (%+v), not %s", op.State, op.Failure, state)
	}
	return op
}

const noSuchID = "01k9zxv3m5abcdefghjkmnpqrs"

func TestAPIMalformedRequestsChangeNothing(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		image := w.push("hello", "1", app{})
		op := w.deploy("hello", image, 0, "k1")
		w.await(op.ID, "promoted")
		time.Sleep(time.Minute) // what follows from the promotion is done
		synctest.Wait()
		before := w.state()

		valid := deployBody("hello", image, 1, "k2")
		with := func(old, new string) string { // the valid body with one thing changed
			body := strings.Replace(valid, old, new, 1)
			if body == valid {
				t.Fatalf("%q is not in %s", old, valid)
			}
			return body
		}
		digest := digestOf(image)
		field := func(name string) string { // the member of that name
			for _, part := range strings.Split(strings.Trim(valid, "{}"), `,"`) {
				if part = strings.TrimPrefix(part, `"`); strings.HasPrefix(part, name+`"`) {
					return `"` + part
				}
			}
			t.Fatalf("no field %s", name)
			return ""
		}
		type request struct {
			name, method, path, body string
			status                   int
			code, field              string
		}
		var table []request
		add := func(name, method, path, body string, status int, code, field string) {
			table = append(table, request{name, method, path, body, status, code, field})
		}
		body := func(name, body, field string) {
			add(name, "POST", "/v1/deployments", body, 400, "invalid_request", field)
		}
		body("no body", "", "")
		body("no JSON", "deploy hello", "")
		body("cut off", valid[:len(valid)-1], "")
		body("cut off in a value", valid[:len(valid)/2], "")
		body("an array", "["+valid+"]", "")
		body("null", "null", "")
		body("a string", `"hello"`, "")
		body("trailing data", valid+" {}", "")
		body("trailing garbage", valid+"x", "")
		body("a comment", valid+" // mine", "")
		body("two documents", valid+valid, "")
		body("single quotes", strings.ReplaceAll(valid, `"`, `'`), "")
		body("an unknown field", with("{", `{"force":true,`), "force")
		body("a field in capitals", with(`"service"`, `"Service"`), "Service")
		body("the empty field", with("{", `{"":1,`), "")
		for _, f := range []string{"service", "image", "expected_generation", "idempotency_key"} {
			body(f+" missing", strings.Replace(strings.Replace(valid, field(f), "", 1), ",,", ",", 1), "")
			table[len(table)-1].field = f
			table[len(table)-1].body = strings.NewReplacer("{,", "{", ",}", "}", ",,", ",").Replace(strings.Replace(valid, field(f), "", 1))
			body(f+" twice", with("{", "{"+field(f)+","), f)
			name, value, _ := strings.Cut(field(f), ":")
			body(f+" null", with(field(f), name+":null"), f)
			body(f+" an object", with(field(f), name+`:{"a":1}`), f)
			body(f+" an array", with(field(f), name+":["+value+"]"), f)
			body(f+" a boolean", with(field(f), name+":true"), f)
		}
		body("service a number", with(`"hello"`, "7"), "service")
		for _, name := range []string{"", "Hello", "-hello", "hello-", "he llo", "../hello", "hello/", "hello\\u0000", strings.Repeat("a", 41), "héllo"} {
			body(fmt.Sprintf("service %q", name), with(`"service":"hello"`, `"service":"`+name+`"`), "service")
		}
		for _, ref := range []string{"", "hello", "registry.example.org/apps/hello", "registry.example.org/apps/hello:1", "registry.example.org/apps/hello:1@" + digest,
			"@" + digest, image[:len(image)-1], image + "0", strings.ToUpper(image), "docker://" + image, image + " ", " " + image, image + "\\n", "registry.example.org//apps/hello@" + digest,
			"registry.example.org/../apps/hello@" + digest, "registry.example.org/apps/hello@sha512:" + strings.Repeat("0", 128), "registry.example.org/apps/hello@sha256:", "hello@" + digest} {
			body(fmt.Sprintf("image %q", ref), with(`"`+image+`"`, `"`+ref+`"`), "image")
		}
		for _, n := range []string{"-1", "1.5", "1e30", `"1"`, "99999999999999999999"} {
			body("expected_generation "+n, with(`"expected_generation":1`, `"expected_generation":`+n), "expected_generation")
		}
		for _, key := range []string{"", "a b", "a/b", "ä", strings.Repeat("k", 129), "a\\n"} {
			body(fmt.Sprintf("idempotency_key %q", key), with(`"k2"`, `"`+key+`"`), "idempotency_key")
		}
		add("huge body", "POST", "/v1/deployments", with(`"k2"`, `"`+strings.Repeat("k", maxBody)+`"`), 413, "invalid_request", "")
		add("huge body of white space", "POST", "/v1/deployments", valid+strings.Repeat(" ", maxBody), 413, "invalid_request", "")
		add("unknown service", "POST", "/v1/deployments", with(`"hello"`, `"nobody"`), 404, "not_found", "")
		add("broken enrollment", "POST", "/v1/deployments", deployBody("broken", strings.Replace(image, "hello", "broken", 1), 0, "k"), 422, "enrollment_invalid", "")
		add("another's repository", "POST", "/v1/deployments", deployBody("hello", strings.Replace(image, "hello", "other", 1), 1, "k"), 422, "repository_not_allowed", "")
		add("a part of the repository", "POST", "/v1/deployments", deployBody("hello", strings.Replace(image, "hello", "hello/more", 1), 1, "k"), 422, "repository_not_allowed", "")
		add("stale generation", "POST", "/v1/deployments", deployBody("hello", image, 0, "k"), 409, "stale_generation", "")
		add("generation to come", "POST", "/v1/deployments", deployBody("hello", image, 2, "k"), 409, "stale_generation", "")
		add("used key", "POST", "/v1/deployments", deployBody("hello", image, 1, "k1"), 422, "key_reused", "")
		add("a dry run without a value", "POST", "/v1/deployments?dry_run=", valid, 400, "invalid_request", "dry_run")
		add("a dry run without anything", "POST", "/v1/deployments?dry_run", valid, 400, "invalid_request", "dry_run")
		add("a dry run, maybe", "POST", "/v1/deployments?dry_run=maybe", valid, 400, "invalid_request", "dry_run")
		for _, route := range []string{"suspend", "resume"} {
			add(route+" with a body", "POST", "/v1/services/hello/"+route, `{"force":true}`, 400, "invalid_request", "")
			add(route+" of nobody", "POST", "/v1/services/nobody/"+route, "", 404, "not_found", "")
		}
		add("suspend without a revision", "POST", "/v1/services/other/suspend", "", 409, "no_revision", "")
		retire, reconcile := "/v1/services/hello/retire", "/v1/services/hello/reconcile"
		add("retire without a body", "POST", retire, "", 400, "invalid_request", "")
		add("retire nothing", "POST", retire, "{}", 400, "invalid_request", "generation")
		add("retire a negative generation", "POST", retire, `{"generation":-1}`, 400, "invalid_request", "generation")
		add("retire a text", "POST", retire, `{"generation":"1"}`, 400, "invalid_request", "generation")
		add("retire what is enrolled", "POST", retire, `{"generation":1}`, 409, "enrolled", "")
		add("reconcile without a body", "POST", reconcile, "", 400, "invalid_request", "")
		add("reconcile nothing", "POST", reconcile, "{}", 400, "invalid_request", "operation_id")
		add("reconcile a number", "POST", reconcile, `{"operation_id":1}`, 400, "invalid_request", "operation_id")
		add("reconcile what is no operation", "POST", reconcile, `{"operation_id":"../x"}`, 404, "not_found", "")
		add("reconcile an unknown operation", "POST", reconcile, `{"operation_id":"`+noSuchID+`"}`, 404, "not_found", "")

		rollback := "/v1/services/hello/rollback"
		add("rollback without a body", "POST", rollback, "", 400, "invalid_request", "")
		add("rollback with half a body", "POST", rollback, `{"expected_generation":1}`, 400, "invalid_request", "idempotency_key")
		add("rollback with an image", "POST", rollback, `{"expected_generation":1,"idempotency_key":"r","image":"x"}`, 400, "invalid_request", "image")
		add("rollback with a negative generation", "POST", rollback, `{"expected_generation":-1,"idempotency_key":"r"}`, 400, "invalid_request", "expected_generation")
		add("rollback without a retained revision", "POST", rollback, `{"expected_generation":1,"idempotency_key":"r"}`, 409, "not_rollbackable", "")
		add("rollback of an unknown service", "POST", "/v1/services/nobody/rollback", `{"expected_generation":1,"idempotency_key":"r"}`, 404, "not_found", "")
		add("rollback of a broken one", "POST", "/v1/services/broken/rollback", `{"expected_generation":0,"idempotency_key":"r"}`, 422, "enrollment_invalid", "")
		add("ending an ended operation", "POST", "/v1/operations/"+op.ID+"/rollback", "", 409, "not_rollbackable", "")
		add("ending with a body", "POST", "/v1/operations/"+op.ID+"/rollback", `{"force":true}`, 400, "invalid_request", "")
		add("ending with a huge body", "POST", "/v1/operations/"+op.ID+"/rollback", strings.Repeat(" ", maxBody+1), 413, "invalid_request", "")
		add("ending an unknown operation", "POST", "/v1/operations/"+noSuchID+"/rollback", "", 404, "not_found", "")

		fsck := func(name, body string, field string) {
			add("fsck: "+name, "POST", "/v1/fsck", body, 400, "invalid_request", field)
		}
		fsck("no JSON", "check", "")
		fsck("an unknown field", `{"repair":true}`, "repair")
		fsck("null", `{"restore":null}`, "restore")
		fsck("trailing data", `{"restore":"services/hello/service.json"}x`, "")
		for _, name := range []string{".", "/", "id", "service.json", "services/nobody/service.json", "services/hello/events.jsonl", "services/hello/service.json.prev", "services/hello/tokens.json",
			"services/../services/hello/service.json", "services/hello/revisions/1.json", "../data/services/hello/service.json", "/etc/passwd", "services/hello/service.json\\u0000"} {
			fsck(fmt.Sprintf("restoring %q", name), `{"restore":"`+name+`"}`, "restore")
		}
		fsck("restoring what is whole", `{"restore":"services/hello/service.json"}`, "restore")
		add("fsck: huge body", "POST", "/v1/fsck", `{"restore":"`+strings.Repeat("x", maxBody)+`"}`, 413, "invalid_request", "")

		for _, id := range []string{noSuchID, "x", strings.ToUpper(op.ID), op.ID + "0", "%2e%2e%2fservice", "..%2f..%2fid", "%00", op.ID + "%0a", "hello"} {
			for _, suffix := range []string{"", "/log"} {
				add("operation "+id+suffix, "GET", "/v1/operations/"+id+suffix, "", 404, "not_found", "")
			}
			add("ending operation "+id, "POST", "/v1/operations/"+id+"/rollback", "", 404, "not_found", "")
		}
		for _, name := range []string{"nobody", "Hello", "%2e%2e", "..%2fhello", "hello%00", strings.Repeat("a", 41)} {
			add("service "+name, "GET", "/v1/services/"+name, "", 404, "not_found", "")
			add("operations of "+name, "GET", "/v1/services/"+name+"/operations", "", 404, "not_found", "")
		}
		for _, wait := range []string{"-1", "61", "soon", "NaN", "Inf", "1m"} {
			add("wait="+wait, "GET", "/v1/operations/"+op.ID+"?wait="+wait, "", 400, "invalid_request", "wait")
		}
		add("after_state", "GET", "/v1/operations/"+op.ID+"?after_state=nowhere", "", 400, "invalid_request", "after_state")
		add("follow", "GET", "/v1/operations/"+op.ID+"/log?follow=perhaps", "", 400, "invalid_request", "follow")
		for _, limit := range []string{"0", "-1", "201", "many", "1.5"} {
			add("limit="+limit, "GET", "/v1/services/hello/operations?limit="+limit, "", 400, "invalid_request", "limit")
		}
		add("before", "GET", "/v1/services/hello/operations?before=x", "", 400, "invalid_request", "before")
		add("parameter twice", "GET", "/v1/operations/"+op.ID+"?wait=1&wait=2", "", 400, "invalid_request", "wait")
		add("unknown parameter", "GET", "/v1/services?sort=name", "", 400, "invalid_request", "sort")
		add("broken query", "GET", "/v1/services?%zz", "", 400, "invalid_request", "")
		for _, path := range []string{"/", "/v1", "/v1/", "/v2/services", "/v1/services/", "/v1//services", "/v1/services/hello/", "/v1/./services", "/v1/x/../services", "/v1/services/hello/metrics", "/v1/metrics", "/v1/rollback", "/v1/operations"} {
			add("route "+path, "GET", path, "", 404, "not_found", "")
		}

		for _, r := range table {
			w.refused(r.name, w.do(r.method, r.path, r.body), r.status, r.code, r.field)
		}

		routes := map[string]string{
			"/v1/deployments": "POST", "/v1/operations/" + op.ID: "GET, HEAD", "/v1/operations/" + op.ID + "/log": "GET, HEAD", "/v1/operations/" + op.ID + "/output": "GET, HEAD", "/v1/operations/" + op.ID + "/rollback": "POST",
			"/v1/services": "GET, HEAD", "/v1/services/hello": "GET, HEAD", "/v1/services/hello/operations": "GET, HEAD", "/v1/services/hello/rollback": "POST",
			"/v1/services/hello/suspend": "POST", "/v1/services/hello/resume": "POST", "/v1/services/hello/retire": "POST", "/v1/services/hello/reconcile": "POST", "/metrics": "GET, HEAD",
			"/v1/version": "GET, HEAD", "/v1/health": "GET, HEAD", "/v1/events": "GET, HEAD", "/v1/audit": "GET, HEAD", "/v1/fsck": "POST", "/v1/backup": "GET, HEAD", "/v1/tokens": "GET, HEAD, POST", "/v1/tokens/x": "DELETE",
		}
		for path, allow := range routes {
			for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
				if slices.Contains(strings.Split(allow, ", "), method) {
					continue
				}
				a := w.do(method, path, valid)
				w.refused(method+" "+path, a, 405, "invalid_request", "")
				if got := a.header.Get("Allow"); got != allow {
					t.Errorf("%s %s: Allow %q, want %q", method, path, got, allow)
				}
			}
		}
		synctest.Wait()
		if after := w.state(); after != before {
			t.Errorf("something was changed; before:\n%s\nafter:\n%s", before, after)
		}
		if a := w.do("GET", "/v1/services/hello", ""); !strings.Contains(a.body, `"generation": 1`) || strings.Contains(a.body, noSuchID) {
			t.Errorf("service is now %s", a.body)
		}
	})
}

func TestAPIBrokenEnrollmentDisablesThatServiceAlone(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		var list wireServices
		must(t, json.Unmarshal([]byte(w.do("GET", "/v1/services", "").body), &list))
		for _, s := range list.Services {
			deploy := s.Actions[slices.IndexFunc(s.Actions, func(a wireAction) bool { return a.Name == "deploy" })]
			if broken := s.Service == "broken"; s.Enrollment.Valid == broken || deploy.Enabled == broken || broken && (deploy.Reason != "enrollment_invalid" || !strings.Contains(s.Enrollment.Problem, "surprise")) {
				t.Errorf("%s: enrollment %+v, deploy %+v", s.Service, s.Enrollment, deploy)
			}
		}
		if len(list.Services) != 3 {
			t.Errorf("%d services", len(list.Services))
		}
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k").ID, "promoted")
	})
}

// A changed template or declaration waits for the next deployment, and the state says so until then.
func TestAPIChangedEnrollmentWaitsForTheNextDeployment(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		differs := func(want bool) {
			t.Helper()
			w.d.refresh()
			var s wireService
			must(t, json.Unmarshal([]byte(w.do("GET", "/v1/services/hello", "").body), &s))
			if s.Enrollment.DiffersFromCurrent != want {
				t.Errorf("differs_from_current is %v, want %v", !want, want)
			}
		}
		change := func(file, from, to string) {
			t.Helper()
			path := filepath.Join(w.enrollment, file)
			text := string(readFile(t, path))
			if !strings.Contains(text, from) {
				t.Fatalf("%s has no %s", file, from)
			}
			must(t, os.WriteFile(path, []byte(strings.Replace(text, from, to, 1)), 0o600))
		}
		image := w.push("hello", "1", app{})
		differs(false) // from nothing
		w.await(w.deploy("hello", image, 0, "k1").ID, "promoted")
		differs(false)
		s, err := w.d.service("hello")
		must(t, err)
		time.Sleep(5 * time.Second) // the unit is installed
		before := readFile(t, s.unitPath("hello.container"))

		change("hello.container", "[Container]\n", "[Container]\nEnvironment=NEW=1\n")
		differs(true)
		change("hello.container", "Environment=NEW=1\n", "")
		differs(false)
		change("hello.json", `"restart_budget":1`, `"restart_budget":2`)
		differs(true)
		change("hello.container", "[Container]\n", "[Container]\nEnvironment=NEW=1\n")
		time.Sleep(time.Hour)
		if got := readFile(t, s.unitPath("hello.container")); string(got) != string(before) {
			t.Errorf("the unit in force changed:\n%s", got)
		}
		w.await(w.deploy("hello", image, 1, "k2").ID, "promoted")
		differs(false)
		if got := readFile(t, s.unitPath("hello.container")); !strings.Contains(string(got), "Environment=NEW=1") {
			t.Errorf("the deployment did not take the template up:\n%s", got)
		}
	})
}

// A record that cannot be read at Toad's start closes its service: every route says so, and none breaks down.
func TestUnreadableFromTheStart(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		first := w.deploy("hello", w.push("hello", "1", app{}), 0, "k1")
		w.await(first.ID, "promoted")
		w.await(w.deploy("hello", w.push("hello", "2", app{}), 1, "k2").ID, "promoted")
		time.Sleep(time.Minute)
		_, token := w.token("hello", 0, tokenVerbs...)
		w.end()
		must(t, os.WriteFile(filepath.Join(w.dir, "services", "hello", "service.json"), []byte("garbage"), 0o600))
		w.begin()
		for _, rt := range w.d.routes() {
			method, path, _ := strings.Cut(strings.NewReplacer("{service}", "hello", "{id}", first.ID).Replace(rt.pattern), " ")
			if method == "DELETE" || path == "/v1/backup" { // of a token; refused as a whole
				continue
			}
			body := map[string]string{"/v1/deployments": deployBody("hello", first.Candidate.Image, 2, "k3"), "/v1/tokens": `{"service":"hello","label":"l","verbs":["read"]}`,
				"/v1/services/hello/rollback": `{"expected_generation":2,"idempotency_key":"k4"}`, "/v1/rollback": `{"expected_generation":2,"idempotency_key":"k4"}`,
				"/v1/services/hello/reconcile": `{"operation_id":"` + first.ID + `"}`, "/v1/services/hello/retire": `{"generation":2}`}[path]
			if method == "GET" {
				body = ""
			}
			if rt.unix {
				if a := w.do(method, path, body); a.Code == "internal" || a.status < 400 && method == "POST" && path != "/v1/fsck" && path != "/v1/tokens" {
					t.Errorf("%s %s: %d %s", method, path, a.status, a.body)
				}
			}
			if rt.verb != "" {
				if a := w.over(token, method, path, body); a.Code == "internal" || a.status < 400 && method == "POST" {
					t.Errorf("%s %s with a token: %d %s", method, path, a.status, a.body)
				}
			}
		}
	})
}

// A request that breaks down is answered, and told to the journal alone.
func TestRequestThatBreaksDown(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		var said strings.Builder
		w.d.log = slog.New(slog.NewTextHandler(&said, nil))
		rec := httptest.NewRecorder()
		func() {
			defer w.d.survive(rec, httptest.NewRequest("GET", "/v1/services", nil))
			panic(canary)
		}()
		if rec.Code != 500 || strings.Contains(rec.Body.String(), canary) || !strings.Contains(rec.Body.String(), `"internal"`) || !strings.Contains(said.String(), canary) {
			t.Errorf("%d %s; the journal: %s", rec.Code, rec.Body, said.String())
		}
	})
}

// A record of the history that cannot be read hides none of the others, and the order is that of acceptance
// whatever the wall clock does.
func TestHistoryGoesOn(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		var ids []string
		for i := range int64(4) {
			op := w.deploy("hello", w.push("hello", fmt.Sprint(i), app{}), i, fmt.Sprint("k", i))
			w.await(op.ID, "promoted")
			ids = append([]string{op.ID}, ids...)
			time.Sleep(time.Minute)
			w.h.mu.Lock()
			w.h.wallOffset -= time.Hour
			w.h.mu.Unlock()
		}
		must(t, os.WriteFile(filepath.Join(w.dir, "services", "hello", "operations", ids[2]+".json"), []byte("garbage"), 0o600))
		var list wireOperations
		must(t, json.Unmarshal([]byte(w.do("GET", "/v1/services/hello/operations", "").body), &list))
		var got []string
		for _, op := range list.Operations {
			got = append(got, op.ID)
		}
		if want := []string{ids[0], ids[1], ids[3]}; !slices.Equal(got, want) {
			t.Errorf("listed %v, want %v", got, want)
		}
	})
}

// TestReadsTouchNoDisk reads all that is live again while no file of the records and the enrollments is there.
func TestReadsTouchNoDisk(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		time.Sleep(time.Minute) // what follows from the promotion is done
		op := w.deploy("hello", w.push("hello", "2", app{readyAfter: time.Second}), 1, "k2")
		w.await(op.ID, "probation")
		ended := w.deploy("other", w.push("other", "1", app{exitAfter: time.Second}), 0, "k3")
		w.await(ended.ID, "failed")
		w.d.refresh()
		synctest.Wait()
		page := w.d.webHandler()
		read := func() map[string]string {
			all := map[string]string{}
			for _, path := range []string{"/v1/services", "/v1/services/hello", "/v1/services/other", "/v1/services/broken", "/v1/operations/" + op.ID,
				"/v1/operations/" + op.ID + "/log", "/v1/operations/" + ended.ID, "/v1/operations/" + ended.ID + "/log", "/v1/health", "/metrics", "/v1/version"} {
				a := w.do("GET", path, "")
				if all[path] = a.body; a.status != 200 {
					t.Errorf("%s: %d %s", path, a.status, a.body)
				}
			}
			for _, path := range []string{"/", "/index.json", "/services/hello", "/services/hello.json"} {
				rec := httptest.NewRecorder()
				page.ServeHTTP(rec, httptest.NewRequest("GET", path, nil))
				if all[path] = rec.Body.String(); rec.Code != 200 {
					t.Errorf("%s: %d", path, rec.Code)
				}
			}
			return all
		}
		before := read()
		for _, dir := range []string{w.dir, w.enrollment, w.h.quadlets} {
			must(t, os.Rename(dir, dir+".away"))
		}
		for path, now := range read() {
			if now != before[path] {
				t.Errorf("%s without the files:\n%s\nwith them:\n%s", path, now, before[path])
			}
		}
		for _, dir := range []string{w.dir, w.enrollment, w.h.quadlets} {
			must(t, os.Rename(dir+".away", dir))
		}
		w.await(op.ID, "promoted")
	})
}

// TestAPIOrderOfChecks sends requests with two faults, and demands the one that is looked for first.
func TestAPIOrderOfChecks(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		image := w.push("hello", "1", app{})
		foreign := strings.Replace(image, "hello", "other", 1)
		w.await(w.deploy("hello", image, 0, "used").ID, "promoted")
		s, err := w.d.service("hello")
		must(t, err)
		closing := func(on bool) {
			s.live.Lock()
			s.live.closing = on
			s.live.Unlock()
		}
		enroll := s.enroll
		try := func(what string, want any, body string) {
			t.Helper()
			a := w.do("POST", "/v1/deployments", body)
			if code, ok := want.(string); ok && a.Code != code || !ok && a.status != want {
				t.Errorf("%s: status %d, %+v, want %v", what, a.status, a.problem, want)
			}
		}
		bad := strings.Replace(deployBody("hello", image, 1, "new"), "}", `,"x":1}`, 1)

		s.setUnavailable(errors.New("the disk failed"))
		try("form before state", "invalid_request", bad)
		try("state before key", "state_unavailable", deployBody("hello", image, 0, "used"))
		s.setUnavailable(nil)

		closing(true)
		s.enroll = func() (enrolled, error) { return enrolled{}, errors.New("no good") }
		try("key before shutting down", 200, deployBody("hello", image, 0, "used"))
		try("reused key before shutting down", "key_reused", deployBody("hello", image, 1, "used"))
		try("shutting down before enrollment", "shutting_down", deployBody("hello", image, 1, "new"))
		closing(false)
		try("enrollment before repository", "enrollment_invalid", deployBody("hello", foreign, 1, "new"))
		s.enroll = enroll

		op := w.deploy("hello", w.push("hello", "2", app{readyAfter: -1}), 1, "second")
		try("repository before active rollout", "repository_not_allowed", deployBody("hello", foreign, 1, "new"))
		try("active rollout before generation", "rollout_active", deployBody("hello", image, 0, "new"))
		a := w.do("POST", "/v1/deployments", deployBody("hello", image, 1, "new"))
		if a.OperationID != op.ID || a.CurrentGeneration == nil || *a.CurrentGeneration != 1 {
			t.Errorf("rollout_active names %+v", a.problem)
		}
		w.await(op.ID, "rolled_back")

		held := w.deploy("other", w.push("other", "1", app{readyAfter: -1, unkillable: true}), 0, "h")
		w.await(held.ID, "failed")
		try("repository before held", "repository_not_allowed", deployBody("other", image, 0, "new"))
		try("held before generation", "held", deployBody("other", foreign, 7, "new"))
		w.set("other", func(a *app) { a.unkillable = false })
	})
}

// set changes how the images of a service behave from now on.
func (w *apiWorld) set(service string, change func(a *app)) {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	for _, a := range w.h.apps {
		change(a)
	}
}

func TestAPIAnswers(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		image := w.push("hello", "1", app{})
		a := w.do("POST", "/v1/deployments", deployBody("hello", image, 0, "k1"))
		op := w.operation(a)
		if a.status != 202 || a.header.Get("Location") != "/v1/operations/"+op.ID || a.header.Get("Content-Type") != "application/json" || op.State != "preparing" || op.RequestedBy != "local" {
			t.Errorf("status %d, %v, %+v", a.status, a.header, op)
		}
		if a := w.do("POST", "/v1/deployments", deployBody("hello", image, 0, "k1")); a.status != 200 || w.operation(a).ID != op.ID {
			t.Errorf("repeated key: status %d", a.status)
		}

		// A wait ends with the state that was known, with a wrong one at once, and with its time.
		begun := time.Now()
		if got := w.operation(w.do("GET", "/v1/operations/"+op.ID+"?wait=60&after_state=promoted", "")); got.State != "preparing" || time.Since(begun) != 0 {
			t.Errorf("after %s: %s", time.Since(begun), got.State)
		}
		got := w.operation(w.do("GET", "/v1/operations/"+op.ID+"?wait=60", ""))
		if got.State == "preparing" {
			t.Errorf("after %s it is still preparing", time.Since(begun))
		}
		got = w.await(op.ID, "probation")
		begun = time.Now()
		if got = w.operation(w.do("GET", "/v1/operations/"+op.ID+"?wait=2.5&after_state=probation", "")); got.State != "probation" || time.Since(begun) != 2500*time.Millisecond {
			t.Errorf("after %s: %s", time.Since(begun), got.State)
		}
		if got.DeadlineAt == nil || got.StabilityWindowSeconds != 30 || got.Generation != 1 || got.Previous != nil {
			t.Errorf("%+v", got)
		}
		w.await(op.ID, "promoted")
		begun = time.Now()
		w.do("GET", "/v1/operations/"+op.ID+"?wait=60&after_state=promoted", "")
		if time.Since(begun) != 0 {
			t.Errorf("waited %s for what has ended", time.Since(begun))
		}

		var page wireOperations
		second := w.await(w.deploy("hello", w.push("hello", "2", app{}), 1, "k2").ID, "promoted")
		must(t, json.Unmarshal([]byte(w.do("GET", "/v1/services/hello/operations?limit=1", "").body), &page))
		if len(page.Operations) != 1 || page.Operations[0].ID != second.ID || page.Next != second.ID {
			t.Errorf("first page: %+v", page)
		}
		page = wireOperations{}
		must(t, json.Unmarshal([]byte(w.do("GET", "/v1/services/hello/operations?limit=1&before="+second.ID, "").body), &page))
		if len(page.Operations) != 1 || page.Operations[0].ID != op.ID || page.Next != "" {
			t.Errorf("second page: %+v", page)
		}

		// The request is repeated after its operation was archived, and is still the same one.
		if a := w.do("POST", "/v1/deployments", deployBody("hello", image, 0, "k1")); a.status != 200 || w.operation(a).ID != op.ID || w.operation(a).State != "promoted" {
			t.Errorf("repeated key of an archived operation: %d %s", a.status, a.body)
		}
		if a := w.do("GET", "/v1/health", ""); a.status != 200 || !strings.Contains(a.body, `"status": "ok"`) {
			t.Errorf("health: %d %s", a.status, a.body)
		}
		for _, body := range []string{"", "{}", `{"restore":""}`} {
			if a := w.do("POST", "/v1/fsck", body); a.status != 200 || !strings.Contains(a.body, `"ok": true`) {
				t.Errorf("fsck %s: %d %s", body, a.status, a.body)
			}
		}
		if a := w.do("GET", "/v1/version", ""); a.status != 200 || !strings.Contains(a.body, `"version"`) {
			t.Errorf("version: %d %s", a.status, a.body)
		}

		a = w.do("POST", "/v1/services/hello/rollback", `{"expected_generation":2,"idempotency_key":"back"}`)
		if back := w.operation(a); a.status != 202 || back.Candidate.Image != image || back.Generation != 3 {
			t.Errorf("rollback: %d %s", a.status, a.body)
		}
		id := w.operation(a).ID
		w.await(id, "probation")
		if a := w.do("POST", "/v1/operations/"+id+"/rollback", "{}"); a.status != 202 || !w.operation(a).RollbackRequested {
			t.Errorf("asked to end: %d %s", a.status, a.body)
		}
		if a := w.do("POST", "/v1/operations/"+id+"/rollback", ""); a.status != 200 {
			t.Errorf("asked again: %d %s", a.status, a.body)
		}
		if end := w.await(id, "rolled_back"); end.Failure == nil || end.Failure.Code != "requested" {
			t.Errorf("%+v", end.Failure)
		}
	})
}

func TestAPILog(t *testing.T) { // E11
	inAPI(t, func(t *testing.T, w *apiWorld) {
		op := w.deploy("hello", w.push("hello", "1", app{}), 0, "k1")

		// A followed log is live: lines come while the operation is under way, and it ends with it.
		pr, pw := io.Pipe()
		done := make(chan time.Time, 1)
		go func() {
			r, _ := http.NewRequest("GET", "http://toad/v1/operations/"+op.ID+"/log?follow=true", nil)
			w.handler.ServeHTTP(&pipeWriter{pw, http.Header{}}, r)
			pw.Close()
			done <- time.Now()
		}()
		var lines []wireLogLine
		began := time.Now()
		var live time.Time
		for sc := bufio.NewScanner(pr); sc.Scan(); {
			var l wireLogLine
			must(t, json.Unmarshal(sc.Bytes(), &l))
			if l.Code == "ready" {
				live = time.Now()
			}
			lines = append(lines, l)
		}
		end := w.await(op.ID, "promoted")
		if live.IsZero() || !live.Before(time.Time(*end.FinishedAt)) {
			t.Errorf("the line of its readiness came at %s, it ended at %s", live, time.Time(*end.FinishedAt))
		}
		if d := (<-done).Sub(time.Time(*end.FinishedAt)); d > 2*time.Second || time.Since(began) > time.Minute {
			t.Errorf("the log ended %s after the operation", d)
		}
		for i, l := range lines {
			if l.Seq != int64(i)+1 || l.Text == "" || l.Code == "" || l.State == "" {
				t.Errorf("line %d is %+v", i, l)
			}
		}
		if lines[0].Code != "accepted" || !slices.ContainsFunc(lines, func(l wireLogLine) bool { return l.Code == "promoted" }) {
			t.Errorf("lines: %+v", lines)
		}

		text := w.do("GET", "/v1/operations/"+op.ID+"/log", "", "Accept", "text/plain")
		if ct := text.header.Get("Content-Type"); ct != "text/plain; charset=utf-8" || !strings.Contains(text.body, " probation    ready: the stability window of 30s begins\n") {
			t.Errorf("%s:\n%s", ct, text.body)
		}
		plain := w.do("GET", "/v1/operations/"+op.ID+"/log", "")
		if ct := plain.header.Get("Content-Type"); ct != "application/x-ndjson" || strings.Count(plain.body, "\n") != len(lines) {
			t.Errorf("%s:\n%s", ct, plain.body)
		}

		// An archived one is told from its file.
		w.await(w.deploy("hello", w.push("hello", "2", app{}), 1, "k2").ID, "promoted")
		if again := w.do("GET", "/v1/operations/"+op.ID+"/log?follow=true", ""); again.status != 200 || !strings.HasPrefix(again.body, plain.body) {
			t.Errorf("archived: status %d\n%s", again.status, again.body)
		}
	})
}

// pipeWriter is a response that is read while it is written.
type pipeWriter struct {
	io.Writer
	header http.Header
}

func (p *pipeWriter) Header() http.Header { return p.header }
func (p *pipeWriter) WriteHeader(int)     {}
func (p *pipeWriter) Flush()              {}

// TestAPIStopping: who waits is answered when the server is to end.
func TestAPIStopping(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		op := w.deploy("hello", w.push("hello", "1", app{readyAfter: -1}), 0, "k1")
		w.await(op.ID, "probation")
		done := make(chan apiAnswer, 2)
		for _, path := range []string{"?wait=60&after_state=probation", "/log?follow=true"} {
			go func() { done <- w.do("GET", "/v1/operations/"+op.ID+path, "") }()
		}
		synctest.Wait()
		begun := time.Now()
		close(w.d.stopping)
		for range 2 {
			if a := <-done; a.status != 200 {
				t.Errorf("status %d: %s", a.status, a.body)
			}
		}
		if d := time.Since(begun); d > time.Second {
			t.Errorf("answered %s after the stop", d)
		}
	})
}

// FuzzDecode: no body makes the decoder of requests panic; what it takes says the same when it is said
// again, and what it does not take is refused as malformed.
func FuzzDecode(f *testing.F) {
	image := "registry.example.org/apps/hello@" + sha(nil)
	for _, body := range []string{"", "null", "{}", "[]", `{"restore":"services/hello/service.json"}`, `{"expected_generation":1,"idempotency_key":"k"}`, `{"service":"a","service":"b"}`,
		deployBody("hello", image, 1, "k"), deployBody("hello", image, 1<<62, "k\u0000"), deployBody("hello", image, 1, "k") + "x", `{"expected_generation":1e999,"idempotency_key":1}`} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		try := func(body []byte, into any, fields ...string) bool {
			err := decode(httptest.NewRequest("POST", "http://toad/", bytes.NewReader(body)), into, fields...)
			var e *apiError
			if err != nil && (!errors.As(err, &e) || e.Code != "invalid_request" || e.Detail == "") {
				t.Errorf("%q: %v", body, err)
			}
			return err == nil
		}
		again := func(v, into any, fields ...string) {
			b, err := json.Marshal(v)
			must(t, err)
			if !try(b, into, fields...) || !reflect.DeepEqual(v, into) {
				t.Errorf("%q is %+v, and said again %+v", body, v, into)
			}
		}
		deploy := []string{"service", "image", "expected_generation", "idempotency_key"}
		if v := new(deployRequest); try(body, v, deploy...) && len(body) < maxBody/8 {
			again(v, new(deployRequest), deploy...)
			_ = checkForm(v.IdempotencyKey, *v.ExpectedGeneration)
			if imageForm.MatchString(v.Image) && !strings.HasPrefix(digestOf(v.Image), "sha256:") {
				t.Errorf("%q is an image without a digest", v.Image)
			}
		}
		if v := new(rollbackRequest); try(body, v, deploy[2:]...) && len(body) < maxBody/8 {
			again(v, new(rollbackRequest), deploy[2:]...)
		}
		if v := new(fsckRequest); try(body, v, "restore") && len(body) < maxBody/8 {
			again(v, new(fsckRequest), "restore")
		}
	})
}

// FuzzQuery: of no query more is taken than the route knows, and no wait is longer than it may be.
func FuzzQuery(f *testing.F) {
	for _, q := range []string{"", "wait=30", "wait=60&after_state=probation", "wait=1&wait=2", "wait=NaN", "wait=0x1p-1", "%zz", "a;b", "wait=1e-320"} {
		f.Add(q)
	}
	f.Fuzz(func(t *testing.T, query string) {
		r := httptest.NewRequest("GET", "http://toad/v1/operations/"+noSuchID, nil)
		r.URL.RawQuery = query
		if checkQuery(r, []string{"wait", "after_state"}) != nil {
			return
		}
		for name := range r.URL.Query() {
			if name != "wait" && name != "after_state" {
				t.Errorf("%q: %q is let through", query, name)
			}
		}
		if d, err := waitOf(r); err == nil && (d < 0 || d > maxWait) {
			t.Errorf("%q waits %s", query, d)
		}
	})
}
