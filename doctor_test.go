package main

import (
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

// doctor finds each thing that the host lacks, says what to do about it, and goes on with the others.
func TestDoctor(t *testing.T) { // E7, and LAB section 10
	sd, manager, _ := newTestSystemd(t)
	f, p := newFakePodman(t)
	data := t.TempDir()
	info := func(rootless bool) {
		f.on("GET", "/info", func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(map[string]any{"host": map[string]any{"security": map[string]any{"rootless": rootless}}, "version": map[string]any{"Version": "5.4.2"}})
		})
	}
	unit := func(name, active string) {
		manager.setUnit(name, fakeUnit(map[string]any{"ActiveState": active, "LoadState": "loaded"}))
	}
	healthy := func() {
		info(true)
		unit("toad.service", "active")
		unit(waitOnline, "active")
	}
	cfg := doctorConfig{data: data, quadlets: quadlets, enrollment: okDir, linger: "yes"}

	healthy()
	if d := examine(t.Context(), sd, p, cfg); !d.OK || len(d.Checks) != 8 {
		t.Fatalf("nothing is wrong: %+v", d)
	}
	for _, tt := range []struct {
		check, remedy string
		spoil         func(cfg *doctorConfig)
	}{
		{"linger", "loginctl enable-linger", func(cfg *doctorConfig) { cfg.linger = "no" }},
		{"toad.service", "journalctl --user -u toad.service", func(*doctorConfig) { unit("toad.service", "failed") }},
		{waitOnline, "network-online.target", func(*doctorConfig) { unit(waitOnline, "failed") }},
		{"podman", "its own user", func(*doctorConfig) { info(false) }},
		{"podman", "podman.socket", func(*doctorConfig) {
			f.on("GET", "/info", func(w http.ResponseWriter, _ *http.Request) { podmanProblem(w, 500, "x") })
		}},
		{"data", "of Toad's user", func(cfg *doctorConfig) { cfg.data = filepath.Join(data, "none") }},
		{"quadlets", "of Toad's user", func(cfg *doctorConfig) { cfg.quadlets = filepath.Join(data, "none") }},
		{"enrollment", "toad check", func(cfg *doctorConfig) { cfg.enrollment = t.TempDir() }},
	} {
		healthy()
		spoiled := cfg
		tt.spoil(&spoiled)
		d := examine(t.Context(), sd, p, spoiled)
		for _, c := range d.Checks {
			if tt.check == "quadlets" && c.Name == "enrollment" {
				continue // it is judged by the networks there
			}
			if (c.Outcome == "problem") != (c.Name == tt.check) || c.Name == tt.check && !strings.Contains(c.Detail, tt.remedy) {
				t.Errorf("%s is wrong: %+v", tt.check, c)
			}
		}
		if d.OK || len(d.Checks) != 8 {
			t.Errorf("%s is wrong: %+v", tt.check, d)
		}
	}

	healthy()
	unasked := cfg
	unasked.linger = ""
	if d := examine(t.Context(), sd, p, unasked); !d.OK || d.Checks[0].Outcome != "unknown" {
		t.Errorf("nobody asked logind: %+v", d.Checks[0])
	}
	none := newSystemd("unix:path=" + filepath.Join(data, "nobus"))
	if d := examine(t.Context(), none, p, cfg); d.OK || d.Checks[1].Name != "systemd" || d.Checks[1].Outcome != "problem" || len(d.Checks) != 6 {
		t.Errorf("no bus: %+v", d)
	}
}
