package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// I12: no secret, host path, environment value, host error text or other service's datum is in anything
// that a token can read. Canaries stand for all of them: in the unit's template, in every error of the
// in-memory host, in paths, and in another service. Each failure code and each refusal is made to happen,
// and after it every route is read with a token.

const canaryTemplate = `[Container]
ContainerName=hello
Environment=PASSWORD=` + canary + `
EnvironmentFile=/srv/` + canary + `/hello.env
Secret=hello,type=env,target=` + canary + `
Volume=/srv/` + canary + `/data:/data
Network=apps.network
StopTimeout=2

[Service]
TimeoutStopSec=5
ExecStartPre=/usr/bin/test -e /srv/` + canary + `

[Install]
WantedBy=default.target
`

// canaryWorld is a world whose service hello is full of canaries, read with a token for it.
type canaryWorld struct {
	*apiWorld
	bearer string   // a token for hello that has all verbs
	others []string // what is another service's
	codes  map[string]bool
}

func inCanary(t *testing.T, codes map[string]bool, f func(w *canaryWorld)) {
	inAPI(t, func(t *testing.T, api *apiWorld) {
		must(t, os.WriteFile(filepath.Join(api.d.enrollments.dir, "hello.container"), []byte(canaryTemplate), 0o600))
		w := &canaryWorld{apiWorld: api, codes: codes}
		_, w.bearer = w.token("hello", 0, tokenVerbs...)
		image := w.push("other", "theirs", app{})
		op := w.deploy("other", image, 0, "theirs")
		w.await(op.ID, "promoted")
		w.others = []string{op.ID, digestOf(image), "apps/other", "other.container"}
		f(w)
		w.search()
		w.set("hello", func(a *app) { a.unkillable = false })
	})
}

// ask makes one request with the token, whose answer holds no canary.
func (w *canaryWorld) ask(method, path, body string, header ...string) apiAnswer {
	w.t.Helper()
	r, err := http.NewRequest(method, "http://toad"+path, strings.NewReader(body))
	must(w.t, err)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	r.Header.Set("Authorization", "Bearer "+w.bearer)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second) // a stream has no end
	defer cancel()
	rec := httptest.NewRecorder()
	described(w.t, w.d.tcpHandler()).ServeHTTP(rec, r.WithContext(ctx))
	a := apiAnswer{status: rec.Code, header: rec.Header(), body: rec.Body.String()}
	_ = json.Unmarshal(rec.Body.Bytes(), &a.problem)
	w.clean(method+" "+path, fmt.Sprint(a.header, a.body))
	return a
}

// clean looks for what must not be told.
func (w *canaryWorld) clean(what, text string) {
	w.t.Helper()
	forbidden := []string{canary, w.dir, w.h.quadlets, w.d.enrollments.dir, "/run/user/", "/user.slice", "7160 [app]"}
	for _, f := range append(forbidden, w.others...) {
		if i := strings.Index(text, f); i >= 0 {
			w.t.Errorf("I12: %s tells %q: …%s…", what, f, text[max(0, i-100):min(len(text), i+len(f)+50)])
		}
	}
}

// search reads everything there is to be read with the token, by every route that is described, and the
// logs and events of hello as they are kept.
func (w *canaryWorld) search() {
	w.t.Helper()
	synctest.Wait()
	var doc struct{ Paths map[string]map[string]any }
	must(w.t, json.Unmarshal(description, &doc))
	ids := []string{noSuchID}
	if op := w.hello().op(); op != nil {
		ids = append(ids, op.ID)
		if op.Failure != nil {
			w.codes[op.Failure.Code] = true
			if op.Failure.Cause != "" {
				w.codes[op.Failure.Cause] = true
			}
		}
	}
	for path, item := range doc.Paths {
		for _, id := range ids {
			path := strings.NewReplacer("{id}", id, "{service}", "hello").Replace(path)
			for method := range item {
				if method == "parameters" || method != "get" && id != noSuchID { // who reads does not end the operation
					continue
				}
				for _, accept := range []string{"", "text/plain", "text/event-stream"} {
					w.ask(strings.ToUpper(method), path, map[string]string{"post": "{}"}[method], "Accept", accept)
				}
			}
		}
	}
	w.ask("GET", "/v1/services/other", "")
	w.ask("GET", "/v1/services/other/operations", "")
	w.ask("GET", "/v1/events?service=other", "")
	for _, suffix := range []string{"", "/log", "/output"} {
		if a := w.ask("GET", "/v1/operations/"+w.others[0]+suffix, ""); a.status != 404 {
			w.t.Errorf("another service's operation%s: %d %s", suffix, a.status, a.body)
		}
	}
	logs, err := filepath.Glob(filepath.Join(w.dir, "services", "hello", "operations", "*.log"))
	must(w.t, err)
	for _, path := range append(logs, filepath.Join(w.dir, "services", "hello", "events.jsonl")) {
		b, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			w.t.Error(err)
		}
		w.clean("hello's "+filepath.Base(path), string(b))
	}
}

// rollOut deploys to hello, and reads everything on the way and at its end.
func (w *canaryWorld) rollOut(name string, a app) wireOperation {
	w.t.Helper()
	op := w.deploy("hello", w.push("hello", name, a), w.hello().rec.Load().Generation, name)
	for !op.Terminal {
		w.search()
		op = w.operation(w.do("GET", "/v1/operations/"+op.ID+"?wait=60&after_state="+op.State, ""))
	}
	w.search()
	return op
}

func (w *canaryWorld) hello() *service {
	w.t.Helper()
	s, err := w.d.service("hello")
	must(w.t, err)
	return s
}

// failing makes each mutation of that name fail with a canary.
func (w *canaryWorld) failing(name string) {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	w.h.mutate = func(got string) (bool, error) {
		if name != "" && strings.HasPrefix(got, name) {
			return false, errors.New(canary + ": " + got + " failed at /run/user/1001/" + canary)
		}
		return true, nil
	}
}

func TestCanariesInFailures(t *testing.T) {
	codes := map[string]bool{}
	fetchFails := func(code string, args ...any) func(w *canaryWorld) {
		return func(w *canaryWorld) {
			w.h.onFetch = func(_ context.Context, image string) error {
				return failed(code, errors.New(canary), append([]any{digestOf(image)}, args...)...)
			}
			w.rollOut("1", app{})
		}
	}
	never := app{readyAfter: -1}
	for code, f := range map[string]func(w *canaryWorld){
		"fetch_failed":         fetchFails("fetch_failed", "no answer"),
		"digest_mismatch":      fetchFails("digest_mismatch"),
		"not_single_platform":  fetchFails("not_single_platform", "linux/amd64", "not in it"),
		"wrong_platform":       fetchFails("wrong_platform", "linux/arm64", "linux/amd64"),
		"unsupported_manifest": fetchFails("unsupported_manifest", "its config cannot be read"),
		"image_too_large":      fetchFails("image_too_large", 1<<40, "the enrolled limit is 1"),
		"load_failed":          func(w *canaryWorld) { w.failing("load image"); w.rollOut("1", app{}) },
		"startup_deadline":     func(w *canaryWorld) { w.rollOut("1", never) },
		"no_rollback_target":   func(w *canaryWorld) { w.rollOut("1", never) },
		"rollout_deadline":     func(w *canaryWorld) { w.rollOut("1", app{readyFor: 20 * time.Second}) },
		"restart_budget":       func(w *canaryWorld) { w.rollOut("1", app{exitAfter: 2 * time.Second}) },
		"unit_failed":          func(w *canaryWorld) { w.rollOut("1", app{exitAfter: 5 * time.Second, noRestart: true}) },
		"start_failed":         func(w *canaryWorld) { w.failing("start hello"); w.rollOut("1", app{}) },
		"interrupted": func(w *canaryWorld) {
			w.h.onFetch = func(context.Context, string) error {
				w.h.mu.Lock()
				defer w.h.mu.Unlock()
				w.h.managerHangs = true
				return nil
			}
			w.rollOut("1", app{})
		},
		"rollback_failed": func(w *canaryWorld) {
			w.rollOut("1", app{})
			w.set("hello", func(a *app) { a.readyAfter = -1 })
			w.rollOut("2", never)
		},
		"termination_unconfirmed": func(w *canaryWorld) { w.rollOut("1", app{unkillable: true}); w.rollOut("2", app{}) },
		"volume_not_covered": func(w *canaryWorld) {
			fetch := w.hello().host.fetch
			w.hello().host.fetch = func(ctx context.Context, dir, image string, limit byteSize) (imageInfo, error) {
				info, err := fetch(ctx, dir, image, limit)
				info.Volumes = []string{"/var/lib/mine"}
				return info, err
			}
			w.rollOut("1", app{})
		},
		"unit_not_owned": func(w *canaryWorld) {
			must(w.t, os.MkdirAll(filepath.Join(w.h.quadlets, "hello"), 0o700))
			must(w.t, os.WriteFile(filepath.Join(w.h.quadlets, "hello", "hello.container"), []byte("[Container]\nImage="+canary+"\n"), 0o600))
			w.rollOut("1", app{})
		},
		"unit_invalid": func(w *canaryWorld) {
			w.h.generator = func(string, []byte) bool { return false }
			w.rollOut("1", app{})
		},
		"foreign_container": func(w *canaryWorld) {
			w.rollOut("1", app{})
			w.h.mu.Lock()
			w.h.containers["f"] = &hostContainer{app: &app{}, container: container{ID: strings.Repeat("f", 64), Name: "hello2", Status: "exited", Unit: canary, Labels: map[string]string{"toad.service": "hello", "secret": canary}}}
			w.h.mu.Unlock()
			w.rollOut("2", app{})
		},
		"stale_enrollment": func(w *canaryWorld) {
			s := w.hello()
			enroll, asked := s.enroll, 0
			s.enroll = func() (enrolled, error) {
				if asked++; asked > 1 {
					return enrolled{}, errors.New(canary + ": no such file")
				}
				return enroll()
			}
			w.rollOut("1", app{})
		},
		"requested": func(w *canaryWorld) {
			op := w.deploy("hello", w.push("hello", "1", never), 0, "1")
			w.await(op.ID, "probation")
			w.ask("POST", "/v1/operations/"+op.ID+"/rollback", "")
			w.await(op.ID, "failed")
		},
		"state_unavailable": func(w *canaryWorld) {
			w.hello().host.fetch = func(ctx context.Context, dir, image string, limit byteSize) (imageInfo, error) {
				return imageInfo{}, fmt.Errorf("%s: %w: %w", canary, errStorage, syscall.ENOSPC)
			}
			w.rollOut("1", app{})
		},
	} {
		t.Run(code, func(t *testing.T) {
			inCanary(t, codes, f)
			if !codes[code] {
				t.Errorf("%s did not happen, only %v", code, slices.Sorted(maps.Keys(codes)))
			}
		})
	}
	for code := range publicTexts {
		if !codes[code] {
			t.Errorf("no failure with the code %s was looked at", code)
		}
	}
}

// localRefusals are codes of refusals by routes that are not there for a token.
var localRefusals = map[string]string{"no_revision": "suspend", "enrolled": "retire"}

func TestCanariesInRefusals(t *testing.T) {
	seen := map[string]bool{}
	inCanary(t, map[string]bool{}, func(w *canaryWorld) {
		s, err := w.d.service("hello")
		must(t, err)
		image := w.push("hello", "1", app{})
		ask := func(code, method, path, body string) {
			t.Helper()
			a := w.ask(method, path, body)
			if a.Code != code {
				t.Errorf("%s %s: %d %s, want %s", method, path, a.status, a.body, code)
			}
			seen[a.Code] = true
		}
		deploy := func(code, image string, generation int64, key string) {
			t.Helper()
			ask(code, "POST", "/v1/deployments", deployBody("hello", image, generation, key))
		}
		ask("invalid_request", "POST", "/v1/deployments", "{}")
		ask("not_found", "GET", "/v1/services/nobody", "")
		ask("not_found", "GET", "/v1/operations/"+noSuchID, "")
		deploy("repository_not_allowed", strings.Replace(image, "hello", "elsewhere", 1), 0, "k")
		deploy("stale_generation", image, 7, "k")
		ask("not_rollbackable", "POST", "/v1/services/hello/rollback", `{"expected_generation":0,"idempotency_key":"k"}`)
		w.await(w.deploy("hello", image, 0, "used").ID, "promoted")
		deploy("key_reused", image, 1, "used")
		for code, route := range localRefusals {
			ask("not_found", "POST", "/v1/services/hello/"+route, "{}")
			seen[code] = true
		}

		all := w.bearer
		w.bearer = "toad_" + noSuchID + "_" + canary
		ask("unauthorized", "GET", "/v1/services/hello", "")
		_, w.bearer = w.token("hello", 0, "read")
		deploy("forbidden", image, 1, "k")
		w.bearer = all
		holder := w.d.tokens.holder(http.Header{"Authorization": {"Bearer " + all}})
		for range cap(holder.slots) {
			holder.slots <- struct{}{}
		}
		deploy("too_many_requests", image, 1, "k")
		for range cap(holder.slots) {
			<-holder.slots
		}

		time.Sleep(time.Minute) // what follows from the promotion is done
		_, err = s.suspend("local")
		must(t, err)
		time.Sleep(time.Minute)
		deploy("suspended", image, 1, "k")
		_, err = s.resume("local")
		must(t, err)
		time.Sleep(time.Minute)
		must(t, s.commit(func(r *record) error { r.Barrier = &barrier{r.Operation.ID, s.now()}; return nil }))
		deploy("rollback_barrier", image, 1, "k")
		w.search()
		_, err = s.reconcile(s.op().ID, "local")
		must(t, err)

		stuck := w.deploy("hello", w.push("hello", "2", app{unkillable: true, readyAfter: -1}), 1, "stuck")
		deploy("rollout_active", image, 1, "k")
		w.await(stuck.ID, "failed")
		deploy("held", image, 1, "k")
		w.search()

		// The broken files of an enrollment are told to nobody outside.
		enrollment := filepath.Join(w.d.enrollments.dir, "hello.container")
		must(t, os.WriteFile(enrollment, []byte(strings.Replace(canaryTemplate, "[Install]", "KillMode="+canary+"\n[Install]", 1)), 0o600))
		w.d.refresh()
		w.search() // it is seen
		time.Sleep(time.Minute)
		w.d.refresh()
		deploy("enrollment_invalid", image, 1, "k")
		w.search()

		s.setUnavailable(errors.New(canary + ": " + w.dir + ": checksum is wrong"))
		deploy("state_unavailable", image, 1, "k")
		w.search()
		s.setUnavailable(nil)
		s.live.Lock()
		s.live.closing = true
		s.live.Unlock()
		deploy("shutting_down", image, 1, "k")
		w.search()

		// An error that nobody thought of: a file, whose name no token may know, is where a directory belongs.
		operations := filepath.Join(w.dir, "services", "hello", "operations")
		must(t, os.Rename(operations, operations+".away"))
		must(t, os.WriteFile(operations+"."+canary, nil, 0o600))
		must(t, os.Symlink(operations+"."+canary, operations))
		if _, err := w.d.data.operationIDs("hello"); err == nil || !strings.Contains(err.Error(), w.dir) {
			t.Errorf("the error has nothing to hide: %v", err)
		}
		ask("internal", "GET", "/v1/services/hello/operations", "")
		must(t, os.Remove(operations))
		must(t, os.Rename(operations+".away", operations))
	})
	for code := range statuses {
		if !seen[code] {
			t.Errorf("no refusal with the code %s was looked at", code)
		}
	}
}
