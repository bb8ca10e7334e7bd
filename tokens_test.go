package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// over asks over TCP. A token that begins with a space or is empty is the whole header.
func (w *apiWorld) over(token, method, path, body string, header ...string) apiAnswer {
	w.t.Helper()
	tcp := *w
	tcp.handler = w.d.tcpHandler()
	if token != "" && token[0] != ' ' {
		token = "Bearer " + token
	}
	if token != "" {
		header = append(header, "Authorization", strings.TrimPrefix(token, " "))
	}
	return tcp.do(method, path, body, header...)
}

// token issues one for a service and returns its id and the whole of it.
func (w *apiWorld) token(service string, expires int, verbs ...string) (id, token string) {
	w.t.Helper()
	body := fmt.Sprintf(`{"service":%q,"label":"a test's","verbs":["%s"]}`, service, strings.Join(verbs, `","`))
	if expires > 0 {
		body = strings.Replace(body, "{", fmt.Sprintf(`{"expires_in_seconds":%d,`, expires), 1)
	}
	a := w.do("POST", "/v1/tokens", body)
	var issued wireIssued
	if err := decodeAnswer([]byte(a.body), &issued); err != nil || a.status != 201 || !strings.HasPrefix(issued.Token, "toad_"+issued.ID+"_") {
		w.t.Fatalf("issuing: %d %s", a.status, a.body)
	}
	return issued.ID, issued.Token
}

func (w *apiWorld) revoke(id string) {
	w.t.Helper()
	if a := w.do("DELETE", "/v1/tokens/"+id, ""); a.status != 200 || !strings.Contains(a.body, `"valid": false`) {
		w.t.Errorf("revoking: %d %s", a.status, a.body)
	}
}

// asked is how the matrix asks for a route: of the token's own service, of another one, and of none that
// there is; the latter two only where the request names one.
type asked struct {
	path, other, none    string
	body, ofOther, ofNot string
	status               int // with a token of this service that has the verb
	code                 string
}

// TestTokenMatrix asks for every route with every kind of credential. A route that is added without an
// entry here fails.
func TestTokenMatrix(t *testing.T) { // E10
	inAPI(t, func(t *testing.T, w *apiWorld) {
		mine := w.deploy("hello", w.push("hello", "1", app{}), 0, "k").ID
		theirs := w.deploy("other", w.push("other", "1", app{}), 0, "k").ID
		w.await(mine, "promoted")
		w.await(theirs, "promoted")
		w.await(w.deploy("other", w.push("other", "2", app{}), 1, "k2").ID, "promoted") // theirs is archived
		time.Sleep(time.Minute)

		back := `{"expected_generation":1,"idempotency_key":"r"}`
		operation := func(suffix, body string, status int, code string) asked {
			return asked{"/v1/operations/" + mine + suffix, "/v1/operations/" + theirs + suffix, "/v1/operations/" + noSuchID + suffix, body, body, body, status, code}
		}
		service := func(suffix, body string, status int, code string) asked {
			return asked{"/v1/services/hello" + suffix, "/v1/services/other" + suffix, "/v1/services/nobody" + suffix, body, body, body, status, code}
		}
		image := w.push("hello", "1", app{})
		matrix := map[string]asked{
			"POST /v1/deployments": {"/v1/deployments", "/v1/deployments", "/v1/deployments",
				deployBody("hello", image, 9, "s"), deployBody("other", image, 9, "s"), deployBody("nobody", image, 9, "s"), 409, "stale_generation"},
			"GET /v1/operations/{id}":           operation("", "", 200, ""),
			"GET /v1/operations/{id}/log":       operation("/log", "", 200, ""),
			"POST /v1/operations/{id}/rollback": operation("/rollback", "", 409, "not_rollbackable"),
			"GET /v1/operations/{id}/output":    {path: "/v1/operations/" + mine + "/output"},
			"GET /v1/services":                  {path: "/v1/services", status: 200},
			"POST /v1/services/{service}/reconcile": {"/v1/services/hello/reconcile", "/v1/services/other/reconcile", "/v1/services/nobody/reconcile",
				`{"operation_id":"` + mine + `"}`, `{"operation_id":"` + theirs + `"}`, `{"operation_id":"` + noSuchID + `"}`, 200, ""},
			"POST /v1/services/{service}/suspend":   {path: "/v1/services/hello/suspend"},
			"POST /v1/services/{service}/resume":    {path: "/v1/services/hello/resume"},
			"POST /v1/services/{service}/retire":    {path: "/v1/services/hello/retire", body: `{"generation":1}`},
			"GET /v1/events":                        {"/v1/events?service=hello", "/v1/events?service=other", "/v1/events?service=nobody", "", "", "", 200, ""},
			"GET /v1/audit":                         {path: "/v1/audit"},
			"GET /metrics":                          {path: "/metrics"},
			"GET /v1/openapi.json":                  {path: "/v1/openapi.json", status: 200},
			"GET /v1/services/{service}":            service("", "", 200, ""),
			"GET /v1/services/{service}/operations": service("/operations", "", 200, ""),
			"POST /v1/services/{service}/rollback":  service("/rollback", back, 409, "not_rollbackable"),
			"POST /v1/rollback":                     {path: "/v1/rollback", body: back, status: 409, code: "not_rollbackable"},
			"GET /v1/version":                       {path: "/v1/version", status: 200},
			"GET /v1/health":                        {path: "/v1/health", status: 200},
			"POST /v1/tokens":                       {path: "/v1/tokens", body: `{"service":"hello","label":"x","verbs":["read"]}`},
			"GET /v1/tokens":                        {path: "/v1/tokens"},
			"DELETE /v1/tokens/{id}":                {path: "/v1/tokens/aaaaaaaaaaaa"},
			"POST /v1/fsck":                         {path: "/v1/fsck"},
			"GET /v1/backup":                        {path: "/v1/backup"},
		}

		one := map[string]string{} // a token of hello with one verb
		for _, v := range tokenVerbs {
			_, one[v] = w.token("hello", 0, v)
		}
		allID, all := w.token("hello", 0, tokenVerbs...)
		_, foreign := w.token("other", 0, tokenVerbs...)
		revokedID, revoked := w.token("hello", 0, tokenVerbs...)
		w.revoke(revokedID)
		_, expired := w.token("hello", 1, tokenVerbs...)
		time.Sleep(time.Second)
		_, short := w.token("hello", 3600, tokenVerbs...)
		_, secret, _ := strings.Cut(strings.TrimPrefix(all, "toad_"), "_")
		refusedAll := map[string]string{
			"no token": "", "an empty header": " ", "no scheme": " " + all, "another scheme": " Basic " + all, "a bare scheme": " Bearer", "cut off": all[:len(all)-1], "too long": all + "0",
			"in capitals": strings.ToUpper(all), "another's secret": strings.Replace(revoked, revokedID, allID, 1), "a secret that is no hash": "toad_" + allID + "_" + strings.Repeat("0", 64),
			"unknown": "toad_" + strings.Repeat("a", 12) + "_" + secret, "its hash": "toad_" + allID + "_" + strings.TrimPrefix(sha([]byte(secret)), "sha256:"),
			"malformed": "token", "with a comma": all + "," + all, "revoked": revoked, "expired": expired,
		}

		for _, rt := range w.d.routes() {
			q, ok := matrix[rt.pattern]
			if !ok {
				t.Errorf("%s has no entry: say who may ask for it", rt.pattern)
				continue
			}
			delete(matrix, rt.pattern)
			method, _, _ := strings.Cut(rt.pattern, " ")
			var first apiAnswer
			for what, token := range refusedAll {
				a := w.over(token, method, q.path, q.body)
				w.refused(rt.pattern+" with "+what, a, 401, "unauthorized", "")
				if a.header.Get("WWW-Authenticate") != "Bearer" {
					t.Errorf("%s with %s: %v", rt.pattern, what, a.header)
				}
				if first.body == "" {
					first = a
				} else if a.body != first.body || !cmp.Equal(a.header, first.header) {
					t.Errorf("%s with %s is told apart: %v %s", rt.pattern, what, a.header, a.body)
				}
			}
			for _, verb := range tokenVerbs {
				a := w.over(one[verb], method, q.path, q.body)
				switch {
				case rt.verb == "":
					w.refused(rt.pattern+" to "+verb, a, 404, "not_found", "")
				case rt.verb != verb:
					if w.refused(rt.pattern+" to "+verb, a, 403, "forbidden", ""); a.Verb != rt.verb {
						t.Errorf("%s to %s: it wants %q", rt.pattern, verb, a.Verb)
					}
				case a.status != q.status || a.Code != q.code:
					t.Errorf("%s to %s: %d %s", rt.pattern, verb, a.status, a.body)
				}
			}
			if a := w.over(short, method, q.path, q.body); rt.verb != "" && a.status != q.status {
				t.Errorf("%s to one that is to expire: %d %s", rt.pattern, a.status, a.body)
			}
			if q.other == "" {
				continue
			}
			not := w.over(all, method, q.none, q.ofNot)
			w.refused(rt.pattern+" of none", not, 404, "not_found", "")
			for what, a := range map[string]apiAnswer{"another's": w.over(all, method, q.other, q.ofOther), "ours to another": w.over(foreign, method, q.path, q.body)} {
				if a.status != 404 || a.body != not.body || !cmp.Equal(a.header, not.header) {
					t.Errorf("%s, %s, is told apart: %d %v %s", rt.pattern, what, a.status, a.header, a.body)
				}
			}
		}
		for pattern := range matrix {
			t.Errorf("%s is no route", pattern)
		}
	})
}

// Nothing that a token can ask for tells of another service, whatever state that is in.
func TestTokenKnowsItsServiceAlone(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		_, token := w.token("hello", 0, tokenVerbs...)
		_, ofBroken := w.token("broken", 0, tokenVerbs...)
		theirs := w.deploy("other", w.push("other", "1", app{}), 0, "theirs").ID
		w.await(theirs, "promoted")
		w.await(w.deploy("other", w.push("other", "2", app{}), 1, "theirs2").ID, "promoted")
		time.Sleep(time.Minute)
		ask := func() map[string]string {
			answers := map[string]string{}
			for _, path := range []string{"/v1/services", "/v1/health", "/v1/version", "/v1/services/other", "/v1/services/other/operations", "/v1/operations/" + theirs,
				"/v1/operations/" + theirs + "/log", "/v1/services/hello", "/v1/services/hello/operations", "/v1/tokens", "/v1/services/hello/operations?before=" + theirs} {
				a := w.over(token, "GET", path, "")
				answers[path] = fmt.Sprint(a.status, a.header, a.body)
				if strings.Contains(a.body, "other") || strings.Contains(a.body, theirs) || strings.Contains(a.body, "broken") {
					t.Errorf("%s tells of others: %s", path, a.body)
				}
			}
			return answers
		}
		before := ask()
		if !strings.Contains(before["/v1/health"], `"total": 1`) {
			t.Errorf("health: %s", before["/v1/health"])
		}
		// A damaged record, an operation under way and a service that cannot be used are theirs alone.
		must(t, os.WriteFile(w.d.data.serviceFile("other", "operations", theirs+".json"), []byte("{}"), 0o600))
		w.deploy("other", w.push("other", "3", app{readyAfter: -1}), 2, "theirs3")
		s, err := w.d.service("other")
		must(t, err)
		s.setUnavailable(errors.New("broken"))
		if diff := cmp.Diff(before, ask()); diff != "" {
			t.Errorf("another's state shows (-before +after):\n%s", diff)
		}
		// A key is of one service, and an enrollment's fault is the operator's to read.
		if a := w.over(token, "POST", "/v1/deployments", deployBody("hello", w.push("hello", "1", app{}), 0, "theirs")); a.status != 202 || !strings.Contains(a.body, `"requested_by": "token:`) {
			t.Errorf("%d %s", a.status, a.body)
		}
		body := deployBody("broken", strings.Replace(w.push("hello", "1", app{}), "hello", "broken", 1), 0, "k")
		if a := w.over(ofBroken, "POST", "/v1/deployments", body); a.Code != "enrollment_invalid" || strings.Contains(a.body, "surprise") || strings.Contains(a.body, ".json") {
			t.Errorf("%d %s", a.status, a.body)
		}
		if a := w.do("POST", "/v1/deployments", body); !strings.Contains(a.Detail, "surprise") {
			t.Errorf("the socket is not told why: %s", a.body)
		}
	})
}

// A revocation and an expiry end what waits and what streams, and nothing of it is told afterwards.
func TestTokenEndsUnderway(t *testing.T) {
	for _, how := range []string{"revoked", "expired"} {
		t.Run(how, func(t *testing.T) {
			inAPI(t, func(t *testing.T, w *apiWorld) {
				op := w.deploy("hello", w.push("hello", "1", app{readyAfter: -1}), 0, "k")
				w.await(op.ID, "probation")
				expires := 0
				if how == "expired" {
					expires = 10
				}
				id, token := w.token("hello", expires, "read")
				_, stays := w.token("hello", 0, "read")
				wait := "/v1/operations/" + op.ID + "?wait=60&after_state=probation"
				waited, other := make(chan apiAnswer, 1), make(chan apiAnswer, 1)
				go func() { waited <- w.over(token, "GET", wait, "") }()
				go func() { other <- w.over(stays, "GET", wait, "") }()
				pr, pw := io.Pipe()
				go func() {
					r, _ := http.NewRequest("GET", "http://toad/v1/operations/"+op.ID+"/log?follow=true", nil)
					r.Header.Set("Authorization", "Bearer "+token)
					w.d.tcpHandler().ServeHTTP(&pipeWriter{pw, http.Header{}}, r)
					pw.Close()
				}()
				streamed := make(chan string, 1)
				go func() { b, _ := io.ReadAll(pr); streamed <- string(b) }()
				synctest.Wait()
				begun := time.Now()
				if how == "revoked" {
					w.revoke(id)
				}
				a := <-waited
				w.refused("the wait", a, 401, "unauthorized", "")
				if strings.Contains(a.body, op.ID) || a.header.Get("WWW-Authenticate") != "Bearer" {
					t.Errorf("%v %s", a.header, a.body)
				}
				if s := <-streamed; !strings.HasPrefix(s, `{"seq":1,`) {
					t.Errorf("streamed %q", s)
				}
				if d := time.Since(begun); d != time.Duration(expires)*time.Second {
					t.Errorf("ended after %s", d)
				}
				if a := <-other; a.status != 200 {
					t.Errorf("another token's wait: %d %s", a.status, a.body)
				}
			})
		})
	}
}

// What was begun and is not accepted when the token ends is refused, even past the door.
func TestTokenEndedBeforeTheAcceptance(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		rec, _, err := w.s.issue("local", "ci", tokenVerbs, 0)
		must(t, err)
		op := w.submit(w.push("v1", app{}))
		must(t, w.s.revokeAll("local"))
		var e *apiError
		if _, _, err := w.s.requestRollback(op.ID, "token:"+rec.ID); !errors.As(err, &e) || e.Code != "unauthorized" {
			t.Errorf("it ends an operation: %v", err)
		}
		w.await(op.ID)
		req := w.request(w.push("v2", app{}), "k2")
		req.actor = "token:" + rec.ID
		if _, _, err := w.s.submit(req); !errors.As(err, &e) || e.Code != "unauthorized" {
			t.Errorf("it deploys: %v", err)
		}
	})
}

func header(token string) http.Header { return http.Header{"Authorization": {"Bearer " + token}} }

// allows tells whether a token would be let in.
func (w *world) allows(token string) bool {
	t := w.s.index.holder(header(token))
	return t != nil && t.valid(w.s.now())
}

func TestTokensSurviveARestart(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		keep, kept, err := w.s.issue("local", "kept", []string{"read", "deploy"}, time.Hour)
		must(t, err)
		gone, ended, err := w.s.issue("local", "ended", []string{"read"}, 0)
		must(t, err)
		w.s.index.get(keep.ID).used.Store(w.s.now().UnixMilli())
		w.s.saveUses()
		must(t, w.s.revoke("local", func(k *token) bool { return k.ID == gone.ID }))
		must(t, w.s.revoke("local", func(k *token) bool { return k.ID == gone.ID })) // again is no error and no event
		before := w.s.listTokens()
		w.restart()
		if !w.allows(kept) || w.allows(ended) {
			t.Errorf("kept: %v, ended: %v", w.allows(kept), w.allows(ended))
		}
		if diff := cmp.Diff(before, w.s.listTokens()); diff != "" || len(before) != 2 || before[0].UsedAt == nil || before[1].RevokedAt == nil {
			t.Errorf("(-before +after) %+v:\n%s", before, diff)
		}
		if got := w.eventTypes()[3:]; !slices.Equal(got, []string{"token-issued", "token-issued", "token-revoked"}) {
			t.Errorf("events %v", got)
		}
		if f := w.findings(); len(f) > 0 {
			t.Errorf("findings %+v", f)
		}
		// Its secret is nowhere.
		must(t, filepath.WalkDir(w.dir, func(path string, e os.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			b, err := os.ReadFile(path)
			for _, token := range []string{kept, ended} {
				if bytes.Contains(b, []byte(token[len(token)-64:])) {
					t.Errorf("%s holds a secret", path)
				}
			}
			return err
		}))
		time.Sleep(time.Hour)
		if w.allows(kept) {
			t.Error("it does not expire")
		}
	})
}

// Toad is killed, or the disk fails, before each durable step of an issue and of a revocation. What was
// answered holds afterwards; each token and each revocation has exactly one event; nothing is half done.
func TestTokensAtEveryBoundary(t *testing.T) {
	for _, what := range []string{"issue", "revoke"} {
		for _, how := range []string{"killed", "error"} {
			for n := 1; ; n++ {
				reached := false
				ok := t.Run(fmt.Sprintf("%s %s at %d", what, how, n), func(t *testing.T) {
					inWorld(t, func(t *testing.T, w *world) {
						first, shown, err := w.s.issue("local", "first", []string{"read"}, 0)
						must(t, err)
						left := n
						w.set(func() {
							w.spoil = func(step, path string) error {
								if left--; left != 0 {
									return nil
								}
								reached = true
								if how == "killed" {
									return w.kill()
								}
								return syscall.EIO
							}
						})
						var second string
						if what == "issue" {
							_, second, err = w.s.issue("local", "second", []string{"read"}, 0)
						} else {
							err = w.s.revoke("local", func(k *token) bool { return k.ID == first.ID })
							if w.allows(shown) {
								t.Error("not in force at once")
							}
						}
						answered := err == nil
						w.set(func() { w.spoil = nil })
						switch {
						case !reached:
						case how == "killed":
							w.revive()
						default:
							w.until2("usable again", func() bool { return w.s.usable() == nil && w.s.stale() == nil })
							if what == "revoke" && !answered {
								if w.allows(shown) {
									t.Error("in force no more")
								}
								must(t, w.s.revoke("local", func(k *token) bool { return k.ID == first.ID }))
								answered = true
							}
							w.restart()
						}
						if what == "issue" {
							if answered && !w.allows(second) || !w.allows(shown) {
								t.Errorf("answered: %v, second: %v, first: %v", answered, second != "" && w.allows(second), w.allows(shown))
							}
						} else if answered && w.allows(shown) {
							t.Error("the revocation is lost")
						}
						w.tokensAreTold()
						must(t, w.s.revokeAll("local"))
						w.restart()
						w.tokensAreTold()
					})
				})
				if !ok || !reached {
					break
				}
			}
		}
	}
}

// tokensAreTold demands one event for each token and for each revocation, none else, and whole records.
func (w *world) tokensAreTold() {
	w.t.Helper()
	var want, got []string
	for _, rec := range w.s.listTokens() {
		want = append(want, "token-issued "+rec.ID)
		if rec.RevokedAt != nil {
			want = append(want, "token-revoked "+rec.ID)
		}
	}
	b, err := os.ReadFile(w.data.serviceFile("hello", "events.jsonl"))
	must(w.t, err)
	for line := range strings.Lines(string(b)) {
		var e event
		must(w.t, decodeAnswer([]byte(line), &e))
		if strings.HasPrefix(e.Type, "token-") {
			got = append(got, e.Type+" "+e.Detail)
			if e.Actor != "local" || e.Operation != "" {
				w.t.Errorf("event %+v", e)
			}
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		w.t.Errorf("events (-want +got):\n%s", diff)
	}
	if f := w.findings(); len(f) > 0 {
		w.t.Errorf("findings %+v", f)
	}
}

// On a full disk a revocation is in force at once, and answered when it is durable.
func TestRevocationOnAFullDisk(t *testing.T) { // E8
	var full atomic.Bool
	defer func() { testingOnlyBoundary = nil }()
	testingOnlyBoundary = func(step, path string) error {
		if full.Load() && strings.HasSuffix(path, "tokens.json") {
			return syscall.ENOSPC
		}
		return nil
	}
	inAPI(t, func(t *testing.T, w *apiWorld) {
		id, token := w.token("hello", 0, "read")
		full.Store(true)
		answered := make(chan apiAnswer, 1)
		go func() { answered <- w.do("DELETE", "/v1/tokens/"+id, "") }()
		synctest.Wait()
		w.refused("at once", w.over(token, "GET", "/v1/services", ""), 401, "unauthorized", "")
		time.Sleep(10 * time.Second)
		select {
		case a := <-answered:
			t.Errorf("answered before it is durable: %d %s", a.status, a.body)
		default:
		}
		if a := w.do("POST", "/v1/tokens", `{"service":"hello","label":"x","verbs":["read"]}`); a.Code != "state_unavailable" {
			t.Errorf("issued: %d %s", a.status, a.body)
		}
		full.Store(false)
		if a := <-answered; a.status != 200 {
			t.Errorf("%d %s", a.status, a.body)
		}
		if f, err := w.d.data.tokens("hello", "tokens.json"); err != nil || len(f.Tokens) != 1 || f.Tokens[0].RevokedAt == nil || len(f.Owed) != 0 {
			t.Errorf("%+v %v", f, err)
		}
	})
}

// A revocation needs no usable record of its service; its event comes when there is one.
func TestRevocationWithADamagedRecord(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		rec, shown, err := w.s.issue("local", "ci", []string{"read"}, 0)
		must(t, err)
		w.stop()
		main := w.data.serviceFile("hello", "service.json")
		whole, err := os.ReadFile(main)
		must(t, err)
		must(t, os.WriteFile(main, []byte("garbage"), 0o600))
		w.start()
		if !w.allows(shown) {
			t.Error("the token is forgotten")
		}
		if _, _, err := w.s.issue("local", "more", []string{"read"}, 0); err == nil {
			t.Error("issued")
		}
		must(t, w.s.revoke("local", func(k *token) bool { return k.ID == rec.ID }))
		w.restart()
		if w.allows(shown) {
			t.Error("the revocation is lost")
		}
		must(t, os.WriteFile(main, whole, 0o600))
		w.s.poke()
		w.until2("open", func() bool { return w.s.usable() == nil })
		w.tokensAreTold()
	})
}

// Of a damaged tokens.json no token is valid, deployments are closed, and it is put back only with every
// revocation that the event log knows.
func TestDamagedTokens(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		_, kept, err := w.s.issue("local", "kept", []string{"read"}, 0)
		must(t, err)
		gone, ended, err := w.s.issue("local", "ended", []string{"read"}, 0)
		must(t, err)
		path := w.data.serviceFile("hello", "tokens.json")
		old, err := os.ReadFile(path)
		must(t, err)
		var backup bytes.Buffer
		must(t, w.data.backup(&backup, noLock, time.Now()))
		must(t, w.s.revoke("local", func(k *token) bool { return k.ID == gone.ID }))
		damage := func() {
			w.stop()
			must(t, os.WriteFile(path, []byte("garbage"), 0o600))
			w.start()
			if w.allows(kept) || w.allows(ended) {
				t.Error("a token of a damaged file is valid")
			}
			var e *apiError
			if _, _, err := w.s.submit(w.request(w.push("v1", app{}), "k")); !errors.As(err, &e) || e.Code != "state_unavailable" || strings.Contains(e.Detail, w.dir) {
				t.Errorf("deployed: %v", err)
			}
			if f := w.findings(); len(f) != 1 || f[0].File != "services/hello/tokens.json" {
				t.Errorf("findings %+v", f)
			}
		}
		check := func(how string, valid bool) {
			w.restart()
			if w.allows(kept) != valid || w.allows(ended) {
				t.Errorf("%s: kept %v, ended %v", how, w.allows(kept), w.allows(ended))
			}
			if f := w.findings(); len(f) > 0 {
				t.Errorf("%s: findings %+v", how, f)
			}
		}
		damage()
		must(t, os.WriteFile(path+".prev", old, 0o600)) // of before the revocation
		_, err = w.data.restoreNamed("services/hello/tokens.json", w.runningNow, w.s.now())
		must(t, err)
		check("from the predecessor", true)
		if _, err = w.data.restoreNamed("services/hello/tokens.json", w.runningNow, w.s.now()); err == nil {
			t.Error("a whole one was put back")
		}
		damage()
		w.stop()
		_, err = w.data.restoreBackup(bytes.NewReader(backup.Bytes()), w.runningNow, time.Now().UTC())
		must(t, err)
		w.start()
		check("from the backup", true)

		// Without the log nobody knows which were revoked.
		w.stop()
		must(t, os.WriteFile(w.data.serviceFile("hello", "events.jsonl"), []byte("garbage\n"), 0o600))
		_, err = w.data.restoreNamed("services/hello/service.json", w.runningNow, time.Now().UTC())
		must(t, err)
		w.last = nil
		w.start()
		check("without the log", false)
		damage()
		must(t, os.WriteFile(path+".prev", old, 0o600))
		_, err = w.data.restoreNamed("services/hello/tokens.json", w.runningNow, w.s.now())
		must(t, err)
		check("with a log that was begun anew", false)

		empty := filepath.Join(t.TempDir(), "data")
		must(t, os.Mkdir(empty, 0o700))
		data, err := lockData(empty, t.TempDir())
		must(t, err)
		defer data.close()
		_, err = data.restoreBackup(bytes.NewReader(backup.Bytes()), w.runningNow, time.Now().UTC())
		must(t, err)
		f, err := data.tokens("hello", "tokens.json")
		if must(t, err); len(f.Tokens) != 2 {
			t.Errorf("%d tokens came back", len(f.Tokens))
		}
		for _, k := range f.Tokens {
			if k.RevokedAt == nil {
				t.Errorf("onto an empty directory %s is valid", k.Label)
			}
		}
	})
}

func TestTokenRequests(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		good := `{"service":"hello","label":"ci","verbs":["read"],"expires_in_seconds":60}`
		for name, r := range map[string]struct{ old, new, field string }{
			"no service":       {`"service":"hello",`, ``, "service"},
			"bad service":      {`"hello"`, `"../hello"`, "service"},
			"no label":         {`"label":"ci",`, ``, "label"},
			"empty label":      {`"ci"`, `""`, "label"},
			"label of lines":   {`"ci"`, `"a\nb"`, "label"},
			"long label":       {`"ci"`, `"` + strings.Repeat("x", 65) + `"`, "label"},
			"no verbs":         {`["read"]`, `[]`, "verbs"},
			"verbs a string":   {`["read"]`, `"read"`, "verbs"},
			"verb twice":       {`["read"]`, `["read","read"]`, "verbs"},
			"unknown verb":     {`["read"]`, `["read","admin"]`, "verbs"},
			"expiry null":      {`:60`, `:null`, "expires_in_seconds"},
			"expiry zero":      {`:60`, `:0`, "expires_in_seconds"},
			"expiry too late":  {`:60`, `:9999999999`, "expires_in_seconds"},
			"expiry a text":    {`:60`, `:"720h"`, "expires_in_seconds"},
			"an unknown field": {`"label"`, `"secret":"mine","label"`, "secret"},
		} {
			w.refused(name, w.do("POST", "/v1/tokens", strings.Replace(good, r.old, r.new, 1)), 400, "invalid_request", r.field)
		}
		w.refused("unknown service", w.do("POST", "/v1/tokens", strings.Replace(good, "hello", "nobody", 1)), 404, "not_found", "")
		w.refused("list of an unknown service", w.do("GET", "/v1/tokens?service=nobody", ""), 404, "not_found", "")
		for _, id := range []string{"aaaaaaaaaaaa", "x", "%2e%2e"} {
			w.refused("revoking "+id, w.do("DELETE", "/v1/tokens/"+id, ""), 404, "not_found", "")
		}
		id, token := w.token("hello", 60, "read", "rollback")
		w.token("other", 0, "deploy")
		w.over(token, "GET", "/v1/services", "")
		var list wireTokens
		a := w.do("GET", "/v1/tokens?service=hello", "")
		must(t, decodeAnswer([]byte(a.body), &list))
		if len(list.Tokens) != 1 || strings.Contains(a.body, token[len(token)-64:]) {
			t.Fatalf("list: %s", a.body)
		}
		if k := list.Tokens[0]; k.ID != id || k.Service != "hello" || k.Label != "a test's" || !slices.Equal(k.Verbs, []string{"read", "rollback"}) || !k.Valid || k.ExpiresAt == nil || k.LastUsedAt == nil || k.RevokedAt != nil {
			t.Errorf("%+v", k)
		}
		list = wireTokens{}
		must(t, decodeAnswer([]byte(w.do("GET", "/v1/tokens", "").body), &list))
		if len(list.Tokens) != 2 {
			t.Errorf("%+v", list)
		}
		w.revoke(id)
		w.revoke(id) // a lost answer is asked for again
	})
}

func TestTokenLimits(t *testing.T) {
	t.Run("requests at once", func(t *testing.T) {
		inAPI(t, func(t *testing.T, w *apiWorld) {
			op := w.deploy("hello", w.push("hello", "1", app{readyAfter: -1}), 0, "k")
			w.await(op.ID, "probation")
			_, token := w.token("hello", 0, "read")
			_, other := w.token("hello", 0, "read")
			done := make(chan int, tokenRequests)
			for range tokenRequests {
				go func() {
					done <- w.over(token, "GET", "/v1/operations/"+op.ID+"?wait=20&after_state=probation", "").status
				}()
			}
			synctest.Wait()
			a := w.over(token, "GET", "/v1/services", "")
			w.refused("one more", a, 429, "too_many_requests", "")
			if a.header.Get("Retry-After") != "1" {
				t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
			}
			if a := w.over(other, "GET", "/v1/services", ""); a.status != 200 {
				t.Errorf("another token: %d", a.status)
			}
			for range tokenRequests {
				if status := <-done; status != 200 {
					t.Errorf("status %d", status)
				}
			}
			if a := w.over(token, "GET", "/v1/services", ""); a.status != 200 {
				t.Errorf("afterwards: %d", a.status)
			}
		})
	})
	t.Run("deployments an hour", func(t *testing.T) {
		inWorld(t, func(t *testing.T, w *world) {
			rec, _, err := w.s.issue("local", "ci", tokenVerbs, 0)
			must(t, err)
			image := w.push("v1", app{})
			begun := time.Now()
			var last submission
			try := func(key string) error {
				last = w.request(image, key)
				last.actor = "token:" + rec.ID
				op, _, err := w.s.submit(last)
				if err == nil {
					_, _, err := w.s.requestRollback(op.ID, "local")
					must(t, err)
					w.await(op.ID)
				}
				return err
			}
			for i := range tokenDeployments {
				must(t, try(fmt.Sprint("key", i)))
				if _, existing, err := w.s.submit(last); err != nil || !existing { // counted once
					t.Fatalf("%v %v", existing, err)
				}
			}
			var e *apiError
			if err := try("one-more"); !errors.As(err, &e) || e.Code != "too_many_requests" || e.retry > time.Hour-time.Since(begun) || e.retry <= 0 {
				t.Fatalf("one more: %v", err)
			}
			w.await(w.submit(image).ID) // not that token's
			w.restart()
			if err := try("after a restart"); !errors.As(err, &e) || e.Code != "too_many_requests" {
				t.Fatalf("after a restart: %v", err)
			}
			time.Sleep(e.retry)
			must(t, try("later"))
		})
	})
}

// overPipes serves the API for tokens to clients that speak byte by byte.
func (w *apiWorld) overPipes() (dial func() net.Conn, stop func()) {
	ln := newPipes()
	srv := newServer(w.d.tcpHandler(), slog.New(slog.DiscardHandler))
	go srv.Serve(ln)
	return func() net.Conn { c, _ := ln.dial(w.t.Context(), "", ""); return c }, func() { ln.Close(); srv.Close() }
}

// A client that is slow, silent or too long is let go in its time, and holds up nobody.
func TestSlowClients(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		op := w.deploy("hello", w.push("hello", "1", app{readyAfter: -1}), 0, "k")
		w.await(op.ID, "probation")
		_, token := w.token("hello", 0, tokenVerbs...)
		auth := "Host: toad\r\nAuthorization: Bearer " + token + "\r\n"
		dial, stop := w.overPipes()
		defer stop()
		for name, c := range map[string]struct {
			send  string
			takes time.Duration // until the connection is closed
			says  string
		}{
			"silent":                 {"", 5 * time.Second, ""},
			"half a header":          {"GET /v1/services HTTP/1.1\r\nHost: toad\r\n", 5 * time.Second, ""},
			"half a body":            {"POST /v1/deployments HTTP/1.1\r\n" + auth + "Content-Length: 100\r\n\r\n{", bodyTime, "HTTP/1.1 400"},
			"half a body of a read":  {"GET /v1/services HTTP/1.1\r\n" + auth + "Content-Length: 100\r\n\r\n{", bodyTime, "HTTP/1.1 400"},
			"half a body, no token":  {"POST /v1/deployments HTTP/1.1\r\nHost: toad\r\nContent-Length: 100\r\n\r\n{", bodyTime, "HTTP/1.1 401"},
			"a body without an end":  {"POST /v1/fsck HTTP/1.1\r\n" + auth + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", bodyTime, "HTTP/1.1 400"},
			"a header without end":   {"GET /v1/services HTTP/1.1\r\nHost: toad\r\nX: " + strings.Repeat("x", 40<<10), 2 * time.Second, "HTTP/1.1 431"},
			"options for the server": {"OPTIONS * HTTP/1.1\r\nHost: toad\r\n\r\n", 0, "HTTP/1.1 401"},
		} {
			conn, begun := dial(), time.Now()
			go io.WriteString(conn, c.send)
			b, _ := io.ReadAll(conn)
			if d := time.Since(begun); d > c.takes || !strings.HasPrefix(string(b), c.says) || c.says == "" && len(b) > 0 {
				t.Errorf("%s: after %s %q", name, d, b)
			}
			conn.Close()
		}

		// One that does not read: its answer is given up.
		conn, begun := dial(), time.Now()
		io.WriteString(conn, "GET /v1/services HTTP/1.1\r\n"+auth+"\r\n")
		time.Sleep(writeTime + time.Second)
		if b, err := io.ReadAll(conn); len(b) > 0 || err != nil {
			t.Errorf("after %s: %d bytes, %v", time.Since(begun), len(b), err)
		}
		conn.Close()

		// A wait is longer than any of these, and the connection is good for another request.
		op = w.await(op.ID, "failed")
		slow := w.deploy("hello", w.push("hello", "2", app{readyAfter: -1}), 0, "k2")
		w.await(slow.ID, "probation")
		conn = dial()
		defer conn.Close()
		for _, wait := range []int{40, 10} {
			go io.WriteString(conn, fmt.Sprintf("GET /v1/operations/%s?wait=%d&", slow.ID, wait)+"after_state=probation HTTP/1.1\r\n"+auth+"\r\n")
			begun := time.Now()
			b := make([]byte, 64<<10)
			n, err := conn.Read(b)
			if d := time.Since(begun); err != nil || !strings.HasPrefix(string(b[:n]), "HTTP/1.1 200") || d != time.Duration(wait)*time.Second {
				t.Fatalf("after %s: %v %s", d, err, b[:n])
			}
		}
	})
}

// A client that goes away frees what waited for it.
func TestClientGoesAway(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		op := w.deploy("hello", w.push("hello", "1", app{readyAfter: -1}), 0, "k")
		w.await(op.ID, "probation")
		id, token := w.token("hello", 0, "read")
		dial, stop := w.overPipes()
		defer stop()
		conn := dial()
		io.WriteString(conn, "GET /v1/operations/"+op.ID+"?wait=60&after_state=probation HTTP/1.1\r\nHost: toad\r\nAuthorization: Bearer "+token+"\r\n\r\n")
		synctest.Wait()
		if n := len(w.d.tokens.get(id).slots); n != 1 {
			t.Fatalf("%d under way", n)
		}
		conn.Close()
		synctest.Wait()
		if n := len(w.d.tokens.get(id).slots); n != 0 {
			t.Errorf("%d under way", n)
		}
	})
}

// Only a peer with one of the own addresses gets a byte, and only so many at once.
func TestOwnPeers(t *testing.T) {
	serveOn := func(own func() ([]net.Addr, error), bound int) string {
		tcp, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		srv := newServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "hello") }), slog.New(slog.DiscardHandler))
		go srv.Serve(&ownPeers{Listener: tcp, log: slog.New(slog.DiscardHandler), own: own, slots: make(chan struct{}, bound)})
		t.Cleanup(func() { srv.Close() })
		return tcp.Addr().String()
	}
	ask := func(conn net.Conn) string {
		must(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
		io.WriteString(conn, "GET / HTTP/1.0\r\n\r\n")
		b, err := io.ReadAll(conn)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("neither answered nor closed")
		}
		conn.Close()
		return string(b)
	}
	dial := func(address string) net.Conn {
		conn, err := net.Dial("tcp", address)
		must(t, err)
		return conn
	}
	others := func() ([]net.Addr, error) {
		return []net.Addr{&net.IPNet{IP: net.IPv4(10, 89, 0, 92), Mask: net.CIDRMask(24, 32)}, &net.UnixAddr{}}, nil
	}
	if got := ask(dial(serveOn(others, 9))); got != "" {
		t.Errorf("another's address: %q", got)
	}
	if got := ask(dial(serveOn(func() ([]net.Addr, error) { return nil, errors.New("no") }, 9))); got != "" {
		t.Errorf("own addresses unknown: %q", got)
	}
	address := serveOn(net.InterfaceAddrs, 1)
	for range 2 { // a place is given back
		if got := ask(dial(address)); !strings.HasSuffix(got, "hello") {
			t.Errorf("an own address: %q", got)
		}
	}
	held := dial(address)
	defer held.Close()
	io.WriteString(held, "GET / HTTP/1.1\r\nHost: toad\r\n\r\n")
	if _, err := held.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if got := ask(dial(address)); got != "" {
		t.Errorf("one above the bound: %q", got)
	}
}

// The client over TCP, against the real handler: what a token allows is done, and the secret is printed once.
func TestClientWithAToken(t *testing.T) {
	dir, err := os.MkdirTemp("", "toad")
	must(t, err)
	defer os.RemoveAll(dir)
	data, err := openData(filepath.Join(dir), t.TempDir())
	must(t, err)
	defer data.close()
	ctx, cancel := context.WithCancel(t.Context())
	d := &daemon{data: data, host: newFakeHost(t).host(), log: slog.New(slog.DiscardHandler), stopping: make(chan struct{}), ctx: ctx, services: map[string]*service{}}
	d.enrollments = newEnrollments(t.TempDir(), func() enrollOptions { return enrollOptions{} })
	d.add("hello")
	defer d.wg.Wait()
	defer cancel()
	ln, err := net.Listen("unix", filepath.Join(dir, "s"))
	must(t, err)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	for ln, h := range map[net.Listener]http.Handler{ln: d.handler(), tcp: d.tcpHandler()} {
		srv := newServer(h, d.log)
		go srv.Serve(ln)
		defer srv.Close()
	}
	toad := func(status int, args ...string) (stdout, stderr string) {
		t.Helper()
		var out, errs bytes.Buffer
		if got := run(t.Context(), args, &out, &errs); got != status {
			t.Errorf("%v: status %d\n%s%s", args, got, out.String(), errs.String())
		}
		return out.String(), errs.String()
	}
	socket, server := []string{"--socket", ln.Addr().String()}, []string{"--server", "http://" + tcp.Addr().String() + "/"}
	on := func(where []string, args ...string) []string { return append(args, where...) }

	out, errs := toad(0, on(socket, "token", "issue", "hello", "--verbs", "read,deploy", "--label", "ci of hello", "--expires", "720h")...)
	token := strings.TrimSuffix(out, "\n")
	if !tokenForm.MatchString("Bearer "+token) || strings.Contains(errs, token) {
		t.Fatalf("stdout %q, stderr %q", out, errs)
	}
	id := strings.Split(token, "_")[1]
	wantParts(t, "stderr", errs, "token "+id+" for hello: read, deploy, valid until ", "toad token revoke "+id)
	out, _ = toad(0, on(socket, "token", "list")...)
	wantParts(t, "list", out, id, "hello", "read,deploy", "valid", "ci of hello")

	t.Setenv("TOAD_TOKEN", token)
	out, _ = toad(0, on(server, "status")...)
	wantParts(t, "status", out, "hello")
	_, errs = toad(1, on(server, "rollback", "hello", "--expect", "0")...)
	wantParts(t, "rollback", errs, "does not allow rollback", "a token with that verb is needed")
	if strings.Contains(errs, token) {
		t.Error("the token is printed")
	}
	_, errs = toad(1, on(server, "status", "other")...)
	wantParts(t, "another service", errs, "not_found", "a token is for one service")
	t.Setenv("TOAD_TOKEN", "")
	file := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(file, []byte(token+"\n"), 0o600))
	toad(0, on(server, "history", "hello", "--token-file", file, "--json")...)
	toad(2, on(server, "history", "hello", "--token-file", file+"x")...)

	out, _ = toad(0, on(socket, "token", "revoke", id, "--json")...)
	wantParts(t, "revoke", out, `"valid": false`)
	_, errs = toad(1, on(server, "status", "--token-file", file)...)
	wantParts(t, "after the revocation", errs, "unauthorized", "toad token list")
	toad(1, on(socket, "token", "revoke", "aaaaaaaaaaaa")...)
	out, _ = toad(0, on(socket, "token", "list", "hello")...)
	wantParts(t, "list", out, "revoked")
}
