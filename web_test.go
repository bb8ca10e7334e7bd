package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/google/go-cmp/cmp"
)

// look reads a page as a browser gets it from the gateway.
func (w *apiWorld) look(method, path string) *httptest.ResponseRecorder {
	w.t.Helper()
	r := httptest.NewRequest(method, "http://toad.example.org"+path, nil)
	rec := httptest.NewRecorder()
	w.d.webHandler().ServeHTTP(rec, r)
	return rec
}

// webScene is one page at one turn of the story, and its JSON.
type webScene struct{ html, json string }

// webScenes is a story of three services, and the pages at its turns.
func webScenes(t *testing.T) map[string]webScene {
	scenes := map[string]webScene{}
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.h.mu.Lock()
		w.h.wallOffset = time.Until(time.Date(2026, 11, 29, 9, 30, 0, 0, time.UTC))
		w.h.mu.Unlock()
		scene := func(name string) {
			t.Helper()
			synctest.Wait()
			for path, data := range map[string]string{"/": "/index.json", "/services/hello": "/services/hello.json", "/services/other": "/services/other.json", "/services/broken": "/services/broken.json"} {
				page, json := w.look("GET", path), w.look("GET", data)
				if page.Code != http.StatusOK || json.Code != http.StatusOK {
					t.Fatalf("%s of %s: status %d and %d", path, name, page.Code, json.Code)
				}
				scenes["/"+name+path] = webScene{page.Body.String(), json.Body.String()}
			}
		}
		scene("new")
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "webkey-k1").ID, "promoted")
		w.await(w.deploy("other", w.push("other", "1", app{}), 0, "webkey-o1").ID, "promoted")
		time.Sleep(3 * time.Hour)
		w.await(w.deploy("hello", w.push("hello", "2", app{readyAfter: 4 * time.Second}), 1, "webkey-k2").ID, "promoted")
		time.Sleep(20 * time.Minute)
		scene("ready")

		slow := func(by time.Duration) {
			w.h.mu.Lock()
			defer w.h.mu.Unlock()
			w.h.onFetch = func(context.Context, string) error {
				time.Sleep(by)
				return nil
			}
		}
		slow(30 * time.Second)
		op := w.deploy("hello", w.push("hello", "3", app{exitAfter: 5 * time.Second, exitOnce: true, readyAfter: time.Second}), 2, "webkey-k3")
		time.Sleep(10 * time.Second)
		scene("preparing")
		slow(0)
		w.await(op.ID, "probation")
		time.Sleep(20 * time.Second)
		scene("probation")
		w.await(op.ID, "promoted")
		time.Sleep(50 * time.Minute)

		op = w.deploy("hello", w.push("hello", "4", app{exitAfter: 12 * time.Second}), 3, "webkey-k4")
		w.await(op.ID, "rolling_back")
		time.Sleep(200 * time.Millisecond)
		scene("rolling-back")
		w.await(op.ID, "rolled_back")
		time.Sleep(2 * time.Minute)
		scene("rolled-back")

		op = w.deploy("other", w.push("other", "2", app{readyAfter: -1, unkillable: true}), 1, "webkey-o2")
		w.await(op.ID, "failed")
		time.Sleep(30 * time.Second)
		scene("held")
		w.set("other", func(a *app) { a.unkillable = false })

		w.end()
		must(t, os.WriteFile(filepath.Join(w.dir, "services", "other", "service.json"), []byte("{"), 0o600))
		w.begin()
		scene("lost")
	})
	return scenes
}

func TestBrowserPages(t *testing.T) {
	b := newBrowser(t)
	scenes := webScenes(t)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		secure(w.Header())
		if serveAsset(w, r) {
			return
		}
		scene, ok := scenes[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Write([]byte(scene.html))
	}))
	defer srv.Close()
	for _, tt := range []struct{ name, path string }{
		{"overview-new", "/new/"}, {"overview-ready", "/ready/"}, {"overview-probation", "/probation/"}, {"overview-held", "/held/"},
		{"service-ready", "/ready/services/hello"}, {"service-probation", "/probation/services/hello"}, {"service-rolling-back", "/rolling-back/services/hello"},
		{"service-rolled-back", "/rolled-back/services/hello"}, {"service-held", "/held/services/other"}, {"service-broken", "/ready/services/broken"},
		{"service-lost", "/lost/services/other"}, {"service-preparing", "/preparing/services/hello"},
	} {
		for i, with := range []struct {
			name          string
			width, height int64
			scheme        string
			script        bool
		}{
			{"phone-light", 390, 844, "light", true}, {"desktop-dark", 1280, 900, "dark", true},
			{"phone-dark", 390, 844, "dark", false}, {"desktop-light", 1280, 900, "light", false},
		} {
			if i >= 2 && !slices.Contains([]string{"overview-probation", "service-probation", "service-rolled-back"}, tt.name) {
				continue
			}
			b.as(with.width, with.height, with.scheme, with.script)
			b.run(chromedp.Navigate(srv.URL + tt.path))
			if i < 2 { // both sizes, both schemes
				b.accessible(tt.name + "-" + with.name)
			}
			b.shot(tt.name + "-" + with.name)
		}
	}
	b.clean()
}

// TestBrowserFollows has the page follow two rollouts by itself, and by reloading where there is no script.
func TestBrowserFollows(t *testing.T) {
	b := newBrowser(t)
	w := liveWorld(t)
	srv := httptest.NewServer(w.d.webHandler())
	defer srv.Close()
	for _, script := range []bool{true, false} {
		b.as(390, 844, "light", script)
		b.run(chromedp.Navigate(srv.URL + "/services/hello"))
		see := func(what string) string { return b.until(20*time.Second, what, !script) }
		deploy := func(name string, a app) wireOperation {
			var s wireService
			must(t, json.Unmarshal([]byte(w.do("GET", "/v1/services/hello", "").body), &s))
			return w.deploy("hello", w.push("hello", fmt.Sprint(name, script), a), s.Generation, fmt.Sprint(name, script))
		}

		good := deploy("good", app{readyAfter: 2 * time.Second})
		text := see("Ready without a break")
		wantParts(t, "the page in probation", text, "of 10 s", "Restarts", "0 of 1 allowed", "Time left", "Switching over", good.Candidate.Digest[7:19])
		if script { // what the reader opened and where he is survives the next look
			b.run(chromedp.Click(chromedp.CSS("#sum-" + good.ID)))
			b.run(chromedp.Focus(chromedp.CSS("#sum-" + good.ID)))
		}
		text = see(fmt.Sprintf("Generation %d", good.Generation))
		if script {
			if open := result(b, chromedp.Evaluate[bool](`document.getElementById("op-`+good.ID+`").open`)); open {
				t.Error("what was closed opened by itself")
			}
			if id := result(b, chromedp.Evaluate[string](`document.activeElement.id`)); id != "sum-"+good.ID {
				t.Errorf("the focus went to %q", id)
			}
			if said := result(b, chromedp.Evaluate[string](`document.getElementById("said").textContent`)); said != "hello: Ready" && said != "hello: Promoting" {
				t.Errorf("said %q", said)
			}
		}
		wantParts(t, "the promoted page", text, good.Candidate.Digest, fmt.Sprintf("Generation %d", good.Generation))

		bad := deploy("bad", app{readyAfter: time.Second, exitAfter: 1500 * time.Millisecond})
		see("restarted 2 times")
		text = b.untilIn("#op-"+bad.ID, 20*time.Second, "Ended", !script) // the newest, which is open
		wantParts(t, "the operation after a rollback", text, "Rolled back", "restart_budget", "the budget is 1", bad.Candidate.Digest[7:19])
		wantParts(t, "the page after a rollback", b.text(), fmt.Sprintf("Generation %d", good.Generation))
		b.shot(fmt.Sprintf("rolled-back-live-script-%v", script))
	}
	b.clean()
}

// TestBrowserKeyboard goes through a page with the keyboard alone.
func TestBrowserKeyboard(t *testing.T) {
	b := newBrowser(t)
	page := webScenes(t)["/rolled-back/services/hello"].html
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		secure(w.Header())
		if !serveAsset(w, r) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			w.Write([]byte(page))
		}
	}))
	defer srv.Close()
	b.as(1280, 900, "light", true)
	b.run(chromedp.Navigate(srv.URL + "/services/hello"))
	var way []string
	for range 40 {
		b.run(chromedp.KeyEvent("\t"))
		at := result(b, chromedp.Evaluate[string](`(e => e.id || e.className || e.tagName)(document.activeElement)`))
		if at == "BODY" {
			break
		}
		way = append(way, at)
		if ring := result(b, chromedp.Evaluate[string](`getComputedStyle(document.activeElement).outlineStyle`)); ring == "none" {
			t.Errorf("nothing shows that the focus is on %s", at)
		}
	}
	if len(way) < 6 || way[0] != "skip" || way[1] != "brand" || way[2] != "reload" || way[3] != "all" || !strings.HasPrefix(way[4], "sum-") {
		t.Errorf("the way of the focus: %v", way)
	}
	b.run(chromedp.Focus(chromedp.CSS("#"+way[4])), chromedp.KeyEvent("\r"))
	if open := result(b, chromedp.Evaluate[bool](`document.getElementById("`+strings.Replace(way[4], "sum-", "op-", 1)+`").open`)); open {
		t.Error("Enter does not close what is open")
	}
	b.clean()
}

// liveWorld is a daemon on the in-memory host in real time, with one quick service.
func liveWorld(t *testing.T) *apiWorld {
	w := &apiWorld{t: t, h: newFakeHost(t), dir: filepath.Join(t.TempDir(), "data")}
	must(t, os.Mkdir(w.dir, 0o700))
	w.h.data = w.dir
	data, err := openData(w.dir, w.h.quadlets)
	must(t, err)
	dir, en := t.TempDir(), testEnrollment("hello")
	en.Repository = "registry.example.org/apps/hello"
	en.Readiness.Interval = duration(200 * time.Millisecond)
	en.Probation.StabilityWindow = duration(10 * time.Second)
	b, err := json.Marshal(en.enrollment)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "hello.json"), b, 0o600))
	must(t, os.WriteFile(filepath.Join(dir, "hello.container"), en.Template, 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	w.d = &daemon{data: data, host: w.h.host(), log: slog.New(slog.NewTextHandler(testWriter{t}, nil)), stopping: make(chan struct{}), ctx: ctx, services: map[string]*service{}}
	w.d.enrollments = newEnrollments(dir, func() enrollOptions { return enrollOptions{quadlets: w.h.quadlets, claims: w.d.claims()} })
	w.d.refresh()
	w.handler = w.d.handler()
	t.Cleanup(func() {
		cancel()
		w.d.wg.Wait()
		data.close()
	})
	return w
}

// TestPageIsForReading: no request changes anything, and every answer carries what protects its reader.
func TestPageIsForReading(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		time.Sleep(time.Minute)
		synctest.Wait()
		before := w.state()
		paths := []string{"/", "/index.json", "/services/hello", "/services/hello.json", webNames["page.css"], webNames["page.js"], webNames["toad.svg"],
			"/services/nobody", "/services/nobody.json", "/services/", "/services/hello/", "/services/hello/x", "/services/..%2f..%2fid", "/services/%3Cscript%3E", "/page.css", "/web/page.html",
			"/v1/services", "/v1/deployments", "/metrics", "/index.html", "/.json", "/services.json", "//", "/x"}
		for i, path := range paths {
			for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "BREW"} {
				rec := w.look(method, path)
				want := 405
				if method == "GET" || method == "HEAD" {
					if want = 200; i >= 7 {
						want = 404
					}
				} else if rec.Header().Get("Allow") != "GET, HEAD" {
					t.Errorf("%s %s: Allow %q", method, path, rec.Header().Get("Allow"))
				}
				if rec.Code != want {
					t.Errorf("%s %s: status %d, want %d", method, path, rec.Code, want)
				}
				for name, value := range map[string]string{
					"Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
					"X-Content-Type-Options":  "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
				} {
					if got := rec.Header().Get(name); got != value {
						t.Errorf("%s %s: %s %q", method, path, name, got)
					}
				}
				if cache := rec.Header().Get("Cache-Control"); cache != "no-store" && webAssets[path].body == nil {
					t.Errorf("%s %s: Cache-Control %q", method, path, cache)
				}
				if body := rec.Body.String(); want == 404 && strings.Contains(body, "<script>") {
					t.Errorf("%s %s: %s", method, path, body)
				}
			}
		}
		for _, path := range paths[:4] {
			body := w.look("GET", path).Body.String()
			for _, never := range []string{"<form", "<button", "<input", "<iframe", "style=", "onclick", "http://", "https://"} {
				if strings.Contains(body, never) {
					t.Errorf("%s has %s", path, never)
				}
			}
		}
		synctest.Wait()
		if after := w.state(); after != before {
			t.Errorf("something was changed; before:\n%s\nafter:\n%s", before, after)
		}
	})
}

// TestPageAndItsJSONAreOne: a page made from what the JSON says is the page, so neither shows more.
func TestPageAndItsJSONAreOne(t *testing.T) {
	for name, scene := range webScenes(t) {
		var page webPage
		if err := json.Unmarshal([]byte(scene.json), &page); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, scene.json)
		}
		view := "overview"
		if strings.Contains(name, "/services/") {
			view = "service"
		}
		var again strings.Builder
		must(t, webTemplate.ExecuteTemplate(&again, view, page))
		if diff := cmp.Diff(scene.html, again.String()); diff != "" {
			t.Errorf("%s (-page +made from its JSON):\n%s", name, diff)
		}
	}
}

// TestPageLeadsToItsJSON: each page's link is to what says the same.
func TestPageLeadsToItsJSON(t *testing.T) {
	for name, scene := range webScenes(t) {
		_, path, _ := strings.Cut(name[1:], "/")
		want := "/" + path + ".json"
		if path == "" {
			want = "/index.json"
		}
		if !strings.Contains(scene.html, `href="`+want+`">This page as JSON`) {
			t.Errorf("%s does not lead to %s", name, want)
		}
	}
}

// TestPageSaysWhatItKnows: without its records nothing of a service is said to be none, and while a rollout has
// not touched what runs, the readiness of that is shown.
func TestPageSaysWhatItKnows(t *testing.T) {
	scenes := webScenes(t)
	part := func(scene, from string) string {
		t.Helper()
		_, rest, ok := strings.Cut(scenes[scene].html, from)
		if !ok {
			t.Fatalf("%s has no %s", scene, from)
		}
		if i := strings.Index(rest, "</div>"); i >= 0 {
			rest = rest[:i]
		}
		return strings.Join(strings.Fields(regexp.MustCompile("<[^>]*>").ReplaceAllString(rest, " ")), " ")
	}
	for _, tt := range []struct{ scene, from, want string }{
		{"/lost/services/other", "<h3>Current revision</h3>", "Unknown"},
		{"/lost/services/other", "<h3>Retained rollback</h3>", "Unknown"},
		{"/lost/services/other", "<h3>Readiness</h3>", "Unknown not looked at yet"},
		{"/lost/services/other", "<h3>Restarts</h3>", "Unknown since the promotion"},
		{"/lost/services/other", "<dt>Starts at boot</dt>", "unknown"},
		{"/new/services/other", "<h3>Current revision</h3>", "None yet The first promotion makes generation 1 or later."},
		{"/new/services/other", "<dt>Starts at boot</dt>", "no"},
		{"/preparing/services/hello", "<h3>Readiness</h3>", "Ready running, seen 10 s ago It runs the current revision The rollout has not touched it yet"},
		{"/probation/services/hello", "<h3>Readiness</h3>", "Ready for 13 s of the candidate, in the rollout"},
	} {
		if got := part(tt.scene, tt.from); got != tt.want {
			t.Errorf("%s, %s: %q, want %q", tt.scene, tt.from, got, tt.want)
		}
	}
	lost := scenes["/lost/services/other"].html + scenes["/lost/"].html[strings.Index(scenes["/lost/"].html, `id="s-other"`):]
	for _, never := range []string{"None", "Nothing was deployed", "not ready"} {
		if strings.Contains(lost, never) {
			t.Errorf("of a service whose records cannot be read it is said %q", never)
		}
	}
	if n := strings.Count(lost, "Unknown"); n != 8 {
		t.Errorf("%d times unknown, want 8", n)
	}

	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		synctest.Wait()
		s := w.d.known("hello")
		was := s.rec.Load()
		for _, tt := range []struct {
			state state
			step  string
			want  bool
		}{{preparing, "", true}, {activating, "", true}, {activating, stepStop, false}, {inProbation, "", false}, {rollingBack, "", false}, {promoted, "", false}} {
			r := was.clone()
			r.Operation.State, r.Operation.Step = tt.state, tt.step
			s.rec.Store(r)
			if got := s.web(false).Untouched; got != tt.want {
				t.Errorf("%s %s: untouched is %v", tt.state, tt.step, got)
			}
		}
		s.rec.Store(was)
	})
}

// TestPageShowsItsOwnContainer: a container of another unit that has the service's name is not shown as its own.
func TestPageShowsItsOwnContainer(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		s := w.d.known("hello")
		own := container{ID: "aa", Name: "hello", Status: "running", Unit: "hello.service"}
		foreign := own
		foreign.ID, foreign.Unit = "bb", "hello-debug.service"
		l := looking{w.h, oneContainer{w.h, foreign}, s}
		s.live.Lock()
		s.live.unit, s.live.container = lookedUnit{name: "hello.service"}, lookedContainer{true, own, s.now()}
		s.live.Unlock()
		_, err := l.Container(t.Context(), "hello")
		must(t, err)
		if got := s.web(false).Container.ID; got != own.ID {
			t.Errorf("shown is %s, want %s", got, own.ID)
		}
		l.containers = oneContainer{w.h, container{ID: "cc", Name: "hello", Status: "exited", Unit: "hello.service"}}
		_, err = l.Container(t.Context(), "hello")
		must(t, err)
		if got := s.web(false).Container.ID; got != "cc" {
			t.Errorf("shown is %s, want cc", got)
		}
	})
}

// oneContainer is a Podman that has one container.
type oneContainer struct {
	containers
	c container
}

func (o oneContainer) Container(context.Context, string) (container, error) { return o.c, nil }

// TestPageKeepsSecrets looks for what nobody may read: environment values, texts of the host's errors, paths,
// keys, and the names of what lies on disk.
func TestPageKeepsSecrets(t *testing.T) {
	for name, scene := range webScenes(t) {
		for _, text := range []string{scene.html, scene.json} {
			for _, secret := range []string{canary, "PASSWORD", "/tmp", os.TempDir(), "/quadlets", "/data", "/user.slice", "/run/user", "generator/", ".config/containers", "idempotency", "webkey-", "[Container]", "[Install]", "ExecStart", "surprise"} {
				if strings.Contains(text, secret) {
					t.Errorf("%s has %q", name, secret)
				}
			}
		}
	}
}

// TestPageEscapes puts a hostile text wherever a text can be, and demands that none of it is markup.
func TestPageEscapes(t *testing.T) {
	const hostile = "\"'><script>alert(1)</script>\u202e\x1b[31m"
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem())
		case reflect.Struct:
			for i := range v.NumField() {
				if v.Type() != reflect.TypeFor[wireTime]() {
					fill(v.Field(i))
				}
			}
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 2, 2))
			fill(v.Index(0))
			fill(v.Index(1))
		case reflect.String:
			v.SetString(hostile)
		}
	}
	for _, view := range []string{"overview", "service"} {
		var page webPage
		fill(reflect.ValueOf(&page).Elem())
		var b strings.Builder
		must(t, webTemplate.ExecuteTemplate(&b, view, page))
		if n := strings.Count(b.String(), "&lt;script&gt;"); n < 10 || strings.Contains(b.String(), "<script>alert") || strings.Contains(b.String(), "\"'>") {
			t.Errorf("%s: escaped %d times:\n%s", view, n, b.String())
		}
	}
	for text, want := range map[string]string{
		"no\u202eitacilpa\u202c": "no\ufffditacilpa\ufffd", "a\nb\x1b[0m\u2028c\u200bd": "a\ufffdb\ufffd[0m\ufffdc\ufffdd", "näh – 你好": "näh – 你好",
	} {
		if got := plain(text); got != want {
			t.Errorf("%q is told as %q, want %q", text, got, want)
		}
	}
}

// TestPageAsksNobody: with the disk away, Podman and systemd hanging, the page shows what was last seen.
func TestPageAsksNobody(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		first := w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		image := w.push("hello", "2", app{})
		second := w.await(w.deploy("hello", image, 1, "k2").ID, "promoted")
		time.Sleep(time.Minute)
		synctest.Wait()
		before := w.look("GET", "/services/hello.json").Body.String()
		var page webPage
		must(t, json.Unmarshal([]byte(before), &page))
		s := page.Services[0]
		if u := s.Unit; u == nil || u.Name != "hello.service" || u.LoadState != "loaded" || u.ActiveState != "active" || u.SubState != "running" || u.MainPID == 0 || u.InvocationID == "" {
			t.Errorf("unit: %+v", u)
		}
		if c := s.Container; c == nil || c.State != "running" || c.Name != "hello" || c.Image != image || c.StartedAt == nil || c.Outdated {
			t.Errorf("container: %+v", c)
		}
		if len(s.Operations) != 2 || s.Operations[0].ID != second.ID || s.Operations[1].ID != first.ID || len(s.Operations[1].Log) < 10 {
			t.Errorf("operations: %+v", s.Operations)
		}
		w.h.mu.Lock()
		w.h.podmanHangs, w.h.managerHangs = true, true
		w.h.mu.Unlock()
		must(t, os.Rename(w.dir, w.dir+".away"))
		begun := time.Now()
		// A name that nobody knows is not looked for, neither with the disk away nor when it was enrolled just now.
		if rec := w.look("GET", "/services/nobody"); rec.Code != http.StatusNotFound || time.Since(begun) != 0 {
			t.Errorf("an unknown name: status %d after %s", rec.Code, time.Since(begun))
		}
		for _, ext := range []string{".json", ".container"} {
			text := strings.ReplaceAll(string(readFile(t, filepath.Join(w.enrollment, "hello"+ext))), "hello", "late")
			must(t, os.WriteFile(filepath.Join(w.enrollment, "late"+ext), []byte(text), 0o600))
		}
		if rec := w.look("GET", "/services/late"); rec.Code != http.StatusNotFound {
			t.Errorf("the page looked at the enrollments: status %d", rec.Code)
		}
		if after := w.look("GET", "/services/hello.json").Body.String(); after != before || time.Since(begun) != 0 {
			t.Errorf("after %s (-before +after):\n%s", time.Since(begun), cmp.Diff(before, after))
		}
		must(t, os.Rename(w.dir+".away", w.dir))
		w.h.mu.Lock()
		w.h.podmanHangs, w.h.managerHangs = false, false
		w.h.mu.Unlock()
	})
}

// TestPageShowsRecentOperations: the newest are kept in memory, and are the same after a restart.
func TestPageShowsRecentOperations(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		var ids []string
		for i := range int64(maxRecent + 3) {
			op := w.await(w.deploy("hello", w.push("hello", fmt.Sprint(i), app{}), i, fmt.Sprint("k", i)).ID, "promoted")
			ids = append([]string{op.ID}, ids...)
			time.Sleep(10 * time.Second)
		}
		s, err := w.d.service("hello")
		must(t, err)
		shown := func() (list []string) {
			for _, o := range s.web(true).Operations {
				if len(o.Log) < 10 || o.Omitted != 0 {
					t.Errorf("%s has %d lines and omits %d", o.ID, len(o.Log), o.Omitted)
				}
				list = append(list, o.ID)
			}
			return list
		}
		if got := shown(); !slices.Equal(got, ids[:maxRecent+1]) {
			t.Errorf("shown: %v, want %v", got, ids[:maxRecent+1])
		}
		must(t, s.open())
		if got := shown(); !slices.Equal(got, ids[:maxRecent+1]) {
			t.Errorf("after opening again: %v, want %v", got, ids[:maxRecent+1])
		}
		for range maxShown + 7 {
			s.say("not_ready", "again")
		}
		if o := s.web(true).Operations[0]; len(o.Log) != maxShown || o.Omitted < 7 || o.Log[maxShown-1].Text != "not ready: again" {
			t.Errorf("%d lines, %d omitted", len(o.Log), o.Omitted)
		}
	})
}

func TestPageStatus(t *testing.T) {
	current := &wireRevision{Generation: 1}
	running := func(ready bool) wireService {
		return wireService{Current: current, Health: wireHealth{State: "running", Ready: ready}}
	}
	at := func(state string) wireService {
		s := running(true)
		s.ActiveOperation = &wireOperation{State: state}
		return s
	}
	health := func(state string, r *wireRevision) wireService {
		return wireService{Current: r, Health: wireHealth{State: state}}
	}
	suspended, retiring, retired := health("stopped", current), health("stopped", nil), health("stopped", nil)
	suspended.Suspended, retiring.Retired, retired.Retired = &wireSuspended{}, &wireRetired{}, &wireRetired{Done: true}
	held := health("held", current)
	held.Held = &wireHeld{}
	lost := running(true)
	lost.Actions = []wireAction{{Name: "deploy", Reason: "state_unavailable"}}
	for want, s := range map[webStatus]wireService{
		{"ok", "Ready"}: running(true), {"warn", "Not ready"}: running(false), {"busy", "Preparing"}: at("preparing"), {"busy", "In probation"}: at("probation"),
		{"warn", "Rolling back"}: at("rolling_back"), {"bad", "Held"}: held, {"warn", "Starting"}: health("starting", current), {"bad", "Failed"}: health("failed", current),
		{"bad", "Stopped"}: health("stopped", current), {"idle", "Nothing deployed"}: health("stopped", nil), {"bad", "Not Toad’s instance"}: health("foreign", nil),
		{"idle", "Unknown"}: health("unknown", current), {"bad", "Records unavailable"}: lost,
		{"idle", "Suspended"}: suspended, {"idle", "Retiring"}: retiring, {"idle", "Retired"}: retired,
	} {
		if got := statusOf(s); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	ready, busy, bad := webService{Status: webStatus{"ok", ""}, wireService: wireService{Enrollment: wireEnrollment{Valid: true}}}, webService{wireService: at("probation")}, webService{Status: webStatus{"bad", ""}}
	for want, services := range map[string][]webService{
		"No service is enrolled.": nil, "The service is ready.": {ready}, "All services are ready.": {ready, ready}, "One rollout is under way.": {ready, busy},
		"Two rollouts are under way.": {busy, busy}, "One of three needs a look, one rollout is under way.": {ready, busy, bad}, "Two of two need a look.": {bad, bad},
	} {
		if got := (webPage{Services: services}).Headline(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
