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
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/chromedp/chromedp"
)

// look reads a page as a browser gets it from the gateway.
func (w *apiWorld) look(method, path string) *httptest.ResponseRecorder {
	w.t.Helper()
	r := httptest.NewRequest(method, "http://toad.example.org"+path, nil)
	rec := httptest.NewRecorder()
	w.d.webHandler().ServeHTTP(rec, r)
	return rec
}

// webScenes is a story of three services, and the pages at its turns.
func webScenes(t *testing.T) map[string]string {
	scenes := map[string]string{}
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.h.mu.Lock()
		w.h.wallOffset = time.Date(2026, 11, 29, 9, 30, 0, 0, time.UTC).Sub(time.Now())
		w.h.mu.Unlock()
		scene := func(name string) {
			t.Helper()
			synctest.Wait()
			for _, path := range []string{"/", "/services/hello", "/services/other", "/services/broken"} {
				rec := w.look("GET", path)
				if rec.Code != http.StatusOK {
					t.Fatalf("%s of %s: status %d", path, name, rec.Code)
				}
				scenes["/"+name+path] = rec.Body.String()
			}
		}
		scene("new")
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		w.await(w.deploy("other", w.push("other", "1", app{}), 0, "o1").ID, "promoted")
		time.Sleep(3 * time.Hour)
		w.await(w.deploy("hello", w.push("hello", "2", app{readyAfter: 4 * time.Second}), 1, "k2").ID, "promoted")
		time.Sleep(20 * time.Minute)
		scene("ready")

		op := w.deploy("hello", w.push("hello", "3", app{exitAfter: 5 * time.Second, exitOnce: true, readyAfter: time.Second}), 2, "k3")
		w.await(op.ID, "probation")
		time.Sleep(20 * time.Second)
		scene("probation")
		w.await(op.ID, "promoted")
		time.Sleep(50 * time.Minute)

		op = w.deploy("hello", w.push("hello", "4", app{exitAfter: 12 * time.Second}), 3, "k4")
		w.await(op.ID, "rolling_back")
		time.Sleep(200 * time.Millisecond)
		scene("rolling-back")
		w.await(op.ID, "rolled_back")
		time.Sleep(2 * time.Minute)
		scene("rolled-back")

		op = w.deploy("other", w.push("other", "2", app{readyAfter: -1, unkillable: true}), 1, "o2")
		w.await(op.ID, "failed")
		time.Sleep(30 * time.Second)
		scene("held")
		w.set("other", func(a *app) { a.unkillable = false })
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
		html, ok := scenes[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Write([]byte(html))
	}))
	defer srv.Close()
	for _, tt := range []struct{ name, path string }{
		{"overview-new", "/new/"}, {"overview-ready", "/ready/"}, {"overview-probation", "/probation/"}, {"overview-held", "/held/"},
		{"service-ready", "/ready/services/hello"}, {"service-probation", "/probation/services/hello"}, {"service-rolling-back", "/rolling-back/services/hello"},
		{"service-rolled-back", "/rolled-back/services/hello"}, {"service-held", "/held/services/other"}, {"service-broken", "/ready/services/broken"},
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
			if open := ask(b, chromedp.Evaluate[bool](`document.getElementById("op-`+good.ID+`").open`)); open {
				t.Error("what was closed opened by itself")
			}
			if id := ask(b, chromedp.Evaluate[string](`document.activeElement.id`)); id != "sum-"+good.ID {
				t.Errorf("the focus went to %q", id)
			}
			if said := ask(b, chromedp.Evaluate[string](`document.getElementById("said").textContent`)); said != "hello: Ready" && said != "hello: Promoting" {
				t.Errorf("said %q", said)
			}
		}
		wantParts(t, "the promoted page", text, good.Candidate.Digest, fmt.Sprintf("Generation %d", good.Generation))

		bad := deploy("bad", app{readyAfter: time.Second, exitAfter: 1500 * time.Millisecond})
		text = see("restarted 2 times")
		wantParts(t, "the page after a rollback", text, "restart_budget", "the budget is 1", fmt.Sprintf("Generation %d", good.Generation), bad.Candidate.Digest[7:19])
		b.shot(fmt.Sprintf("rolled-back-live-script-%v", script))
	}
	b.clean()
}

// TestBrowserKeyboard goes through a page with the keyboard alone.
func TestBrowserKeyboard(t *testing.T) {
	b := newBrowser(t)
	page := webScenes(t)["/rolled-back/services/hello"]
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
		at := ask(b, chromedp.Evaluate[string](`(e => e.id || e.className || e.tagName)(document.activeElement)`))
		if at == "BODY" {
			break
		}
		way = append(way, at)
		if ring := ask(b, chromedp.Evaluate[string](`getComputedStyle(document.activeElement).outlineStyle`)); ring == "none" {
			t.Errorf("nothing shows that the focus is on %s", at)
		}
	}
	if len(way) < 6 || way[0] != "skip" || way[1] != "brand" || way[2] != "reload" || way[3] != "all" || !strings.HasPrefix(way[4], "sum-") {
		t.Errorf("the way of the focus: %v", way)
	}
	b.run(chromedp.Focus(chromedp.CSS("#"+way[4])), chromedp.KeyEvent("\r"))
	if open := ask(b, chromedp.Evaluate[bool](`document.getElementById("`+strings.Replace(way[4], "sum-", "op-", 1)+`").open`)); open {
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
