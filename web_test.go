package main

import (
	"net/http"
	"net/http/httptest"
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
		if a, ok := webAssets[r.URL.Path]; ok {
			w.Header().Set("Content-Type", a.kind)
			w.Write(a.body)
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
		for _, size := range []struct {
			name          string
			width, height int64
		}{{"phone", 390, 844}, {"desktop", 1280, 900}} {
			for _, scheme := range []string{"light", "dark"} {
				for _, script := range []bool{true, false} {
					b.as(size.width, size.height, scheme, script)
					b.run(chromedp.Navigate(srv.URL + tt.path))
					name := tt.name + "-" + size.name + "-" + scheme
					if !script {
						name += "-noscript"
					} else {
						b.accessible(name)
					}
					b.shot(name)
				}
			}
		}
	}
	b.clean()
}
