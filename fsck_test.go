package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func (w *world) findings() []finding { return w.data.fsck(noLock) }

func (w *world) runningNow(service string) ([]container, error) {
	return w.h.Containers(w.t.Context(), service, service+".service", service)
}

// settled is a world with two promoted revisions and nothing under way.
func settled(t *testing.T, w *world) {
	w.promote("v1")
	w.promote("v2")
	w.until("archived", func(r *record) bool {
		_, err := w.data.operation(w.en.Service, r.Operation.ID)
		return err == nil
	})
}

func TestFsckFindsNothingInWholeRecords(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		op := w.await(w.submit(w.push("bad", app{readyAfter: -1})).ID)
		w.expect(op, rolledBack, "startup_deadline")
		time.Sleep(time.Minute)
		if f := w.findings(); len(f) > 0 {
			t.Errorf("findings: %+v", f)
		}
	})
}

// A damaged id is told, and the running server goes on under the one that its units carry.
func TestFsckOfADamagedID(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		id := w.data.id
		must(t, os.WriteFile(filepath.Join(w.data.path, "id"), []byte("x\n"), 0o600))
		if f := w.findings(); len(f) != 1 || f[0].File != "id" || w.data.id != id {
			t.Errorf("findings %+v; the id is %q and was %q", f, w.data.id, id)
		}
	})
}

// Every kind of damage closes the service for admission or is at least reported; the workload runs on,
// and nothing but that is changed.
func TestDamagedRecords(t *testing.T) {
	flip := func(b []byte) []byte {
		b = bytes.Clone(b)
		b[len(b)/2] ^= 1
		return b
	}
	resealed := func(change func(m map[string]any)) func(b []byte) []byte {
		return func(b []byte) []byte {
			r := &record{}
			if err := json.Unmarshal(b, r); err != nil {
				panic(err)
			}
			var m map[string]any
			_ = json.Unmarshal(b, &m)
			change(m)
			b, _ = json.Marshal(m)
			_ = json.Unmarshal(b, r)
			out, _ := encodeRecord(r)
			return out
		}
	}
	for name, tt := range map[string]struct {
		file   string
		damage func(b []byte) []byte // nil: remove
		closed bool
		says   string
	}{
		"empty":              {"service.json", func([]byte) []byte { return nil }, true, "unexpected end"},
		"torn":               {"service.json", func(b []byte) []byte { return b[:len(b)-100] }, true, "unexpected end"},
		"bit flipped":        {"service.json", flip, true, ""},
		"missing":            {"service.json", nil, true, "no such file"},
		"newer version":      {"service.json", func(b []byte) []byte { return bytes.Replace(b, []byte(`"version": 1`), []byte(`"version": 2`), 1) }, true, "newer"},
		"unknown field":      {"service.json", unknownField, true, "unknown field"},
		"contradicting":      {"service.json", resealed(func(m map[string]any) { m["generation"] = 1 }), true, "current revision has generation"},
		"events gone":        {"events.jsonl", nil, true, "service.json names"},
		"events cut":         {"events.jsonl", func(b []byte) []byte { return b[:bytes.LastIndexByte(b[:len(b)-1], '\n')+1] }, true, "service.json names"},
		"events changed":     {"events.jsonl", func(b []byte) []byte { return bytes.Replace(b, []byte("promote"), []byte("xromote"), 1) }, false, "was changed"},
		"events: line gone":  {"events.jsonl", func(b []byte) []byte { return b[bytes.IndexByte(b, '\n')+1:] }, false, "lines before it were removed"},
		"revision damaged":   {"revisions/2.json", flip, true, ""},
		"revision gone":      {"revisions/1.json", nil, false, "the retained revision"},
		"unit damaged":       {"revisions/2.container", flip, true, "do not belong together"},
		"archive damaged":    {"operations/ID.json", flip, false, ""},
		"key damaged":        {"keys/KEY.json", flip, false, ""},
		"predecessor broken": {"service.json.prev", flip, false, ""},
		"somebody's file":    {"notes.txt", func([]byte) []byte { return []byte("mine") }, false, "unknown file"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				settled(t, w)
				op := w.s.op()
				images := w.h.running("hello")
				w.stop()
				file := strings.NewReplacer("ID", op.ID, "KEY", strings.TrimSuffix(filepath.Base(w.data.keyPath("hello", op.Key)), ".json")).Replace(tt.file)
				path := w.data.serviceFile("hello", file)
				b, _ := os.ReadFile(path)
				if tt.damage == nil {
					must(t, os.Remove(path))
				} else {
					must(t, os.WriteFile(path, tt.damage(b), 0o600))
				}
				before := snapshot(t, w.dir)
				found := w.findings()
				if !slices.ContainsFunc(found, func(f finding) bool {
					return strings.HasPrefix(f.File, "services/hello/"+strings.TrimSuffix(file, ".container")) && f.Service == "hello" && strings.Contains(f.Problem, tt.says)
				}) {
					t.Errorf("findings: %+v", found)
				}
				if after := snapshot(t, w.dir); after != before {
					t.Error("fsck changed something")
				}
				w.start()
				time.Sleep(time.Second)
				_, _, err := w.s.submit(submission{kind: "deploy", image: images[0], key: "new", hash: "h", actor: "local", expected: 2})
				var e *apiError
				if closed := errors.As(err, &e) && e.Code == "state_unavailable"; closed != tt.closed {
					t.Errorf("closed for admission: %v (%v), want %v", closed, err, tt.closed)
				}
				if tt.closed {
					w.expectRuns(images...)
					if strings.Contains(e.Detail, w.dir) {
						t.Errorf("the answer names a file: %s", e.Detail)
					}
					if v := w.s.view(true); !strings.Contains(v.Problem, filepath.Base(w.dir)) {
						t.Errorf("the local view does not say why: %q", v.Problem)
					}
				}
			})
		})
	}
}

func unknownField(b []byte) []byte {
	s := strings.Replace(string(b), `"service": "hello",`, `"service": "hello",`+"\n  \"novel\": true,", 1)
	i := strings.LastIndex(s, `  "sha256"`)
	return []byte(s[:i] + `  "sha256": "` + strings.TrimPrefix(sha([]byte(s[:i])), "sha256:") + "\"\n}\n")
}

// snapshot is the content of every file below a directory.
func snapshot(t *testing.T, dir string) string {
	var s strings.Builder
	must(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		s.WriteString(path + " " + sha(b) + "\n")
		return err
	}))
	return s.String()
}

func TestRestoreFromThePredecessor(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		current := w.s.rec.Load().Current.Image
		stale := w.request(current, "before")
		w.stop()
		main := w.data.serviceFile("hello", "service.json")
		must(t, os.WriteFile(main, []byte("garbage"), 0o600))
		w.start()
		w.until2("closed", func() bool { return w.s.usable() != nil })
		what, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now())
		must(t, err)
		if !strings.Contains(what, ".prev") {
			t.Errorf("restored %s", what)
		}
		w.last = nil // the record's history begins anew here
		w.s.poke()
		w.until2("open", func() bool { return w.s.usable() == nil })
		r := w.s.rec.Load()
		if r.Current.Image != current || r.Generation <= 2 || r.NextGeneration <= r.Generation {
			t.Errorf("record %+v", r)
		}
		var e *apiError
		if _, _, err := w.s.submit(stale); !errors.As(err, &e) || e.Code != "stale_generation" {
			t.Errorf("a request of before: %v", err)
		}
		w.until("installed", func(r *record) bool { return r.Installed })
		w.expectRuns(current)
		if f := w.findings(); len(f) > 0 {
			t.Errorf("findings %+v", f)
		}
		if damaged, _ := filepath.Glob(main + ".damaged-*"); len(damaged) != 1 {
			t.Errorf("the damaged file was not kept: %v", damaged)
		}
		if _, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now()); err == nil {
			t.Error("a whole record was put back")
		}
		w.expect(w.await(w.submit(w.push("v3", app{})).ID), promoted, "")
	})
}

// until2 waits for something that is no record's.
func (w *world) until2(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(time.Hour); !ok(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("not within an hour: %s", what)
		}
	}
}

// An operation was under way when the record was lost: it ends interrupted, its candidate is proven gone,
// and the current revision runs again.
func TestRestoreWithAnOperationUnderWay(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		current := w.s.rec.Load().Current.Image
		op := w.submit(w.push("v3", app{readyAfter: -1}))
		w.awaitState(op.ID, inProbation)
		time.Sleep(5 * time.Second)
		w.stop()
		must(t, os.WriteFile(w.data.serviceFile("hello", "service.json"), nil, 0o600))
		w.start()
		time.Sleep(time.Second)
		_, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now())
		must(t, err)
		w.last = nil
		w.s.poke()
		w.until2("open and not held", func() bool { return w.s.usable() == nil && w.s.rec.Load().Held == nil })
		time.Sleep(5 * time.Second)
		w.expectRuns(current)
		got, err := w.data.operation("hello", op.ID)
		if r := w.s.rec.Load(); errors.Is(err, errNotFound) && r.Operation.ID == op.ID {
			got = r.Operation
		}
		if got == nil || got.State != hasFailed || got.Failure.Code != "interrupted" {
			t.Errorf("the operation is %+v", got)
		}
		w.expect(w.await(w.submit(w.push("v4", app{})).ID), promoted, "")
	})
}

// A restore that is killed and made again still holds what may run, raises the barrier, and tells the end of the
// operation once.
func TestRestoreKilledAtEachStep(t *testing.T) {
	for at := 0; ; at++ {
		steps := 0
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			defer func() { w.stop() }()
			w.set(func() { w.en.Barrier = true })
			settled(t, w)
			op := w.submit(w.push("v3", app{readyAfter: -1}))
			w.awaitState(op.ID, inProbation)
			w.stop()
			old := w.s.rec.Load().clone() // as it was before that operation
			last, err := w.data.operation("hello", old.Current.Operation)
			must(t, err)
			old.Operation, old.NextGeneration = last, op.Candidate.Generation
			old.Events = nil
			b, err := encodeRecord(old)
			must(t, err)
			must(t, os.WriteFile(w.data.serviceFile("hello", "service.json.prev"), b, 0o600))
			must(t, os.WriteFile(w.data.serviceFile("hello", "service.json"), nil, 0o600))
			killed := errors.New("killed")
			testingOnlyBoundary = func(step, path string) error {
				if steps++; steps > at {
					return killed
				}
				return nil
			}
			_, err = w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now())
			testingOnlyBoundary = nil
			if (err != nil) != (steps > at) {
				t.Fatalf("killed at %d of %d: %v", at, steps, err)
			}
			if err != nil {
				_, err = w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now().Add(time.Second))
				if err != nil && !strings.Contains(err.Error(), "it is whole") { // the kill came after all was done
					t.Fatal(err)
				}
			}
			r, err := w.data.load("hello")
			must(t, err)
			if r.Held == nil || r.Held.Operation != op.ID || r.Barrier == nil || r.Barrier.Operation != op.ID {
				t.Errorf("killed at %d: held %+v, barrier %+v", at, r.Held, r.Barrier)
			}
			w.last = nil
			w.start()
			w.until2("open and not held", func() bool { return w.s.usable() == nil && w.s.rec.Load().Held == nil })
			n := 0
			for _, e := range w.eventsOf("failed") {
				if e.Operation == op.ID {
					n++
				}
			}
			if c := w.data.audit("hello", noLock); n != 1 || c.Problem != "" {
				t.Errorf("killed at %d: its end was told %d times; %+v", at, n, c)
			}
		})
		if steps <= at {
			break
		}
	}
}

// A record that is damaged on the disk alone is written again from the memory of the running server, and the
// rollout goes on. A damaged log is begun anew, and what follows is in step.
func TestRestoreWhileItRuns(t *testing.T) {
	inAPI(t, func(t *testing.T, w *apiWorld) {
		w.await(w.deploy("hello", w.push("hello", "1", app{}), 0, "k1").ID, "promoted")
		time.Sleep(time.Minute)
		restore := func() apiAnswer { return w.do("POST", "/v1/fsck", `{"restore":"services/hello/service.json"}`) }
		main, log := w.d.data.serviceFile("hello", "service.json"), w.d.data.serviceFile("hello", "events.jsonl")

		op := w.deploy("hello", w.push("hello", "2", app{readyAfter: 2 * time.Second}), 1, "k2")
		w.await(op.ID, "probation")
		synctest.Wait() // nobody writes the record now
		b, err := os.ReadFile(main)
		must(t, err)
		b[len(b)/2] ^= 1
		must(t, os.WriteFile(main, b, 0o600))
		if a := restore(); a.status != 200 || !strings.Contains(a.body, "memory") || !strings.Contains(a.body, `"ok": true`) {
			t.Errorf("%d %s", a.status, a.body)
		}
		b, err = os.ReadFile(log)
		must(t, err)
		must(t, os.WriteFile(log, bytes.Replace(b, []byte(`"cursor":2`), []byte(`"cursor":9`), 1), 0o600))
		if a := restore(); a.status != 400 || !strings.Contains(a.body, "under way") {
			t.Errorf("during a rollout: %d %s", a.status, a.body)
		}
		w.await(op.ID, "promoted")
		time.Sleep(time.Minute)
		if a := restore(); a.status != 200 || !strings.Contains(a.body, `"ok": true`) {
			t.Errorf("%d %s", a.status, a.body)
		}
		time.Sleep(time.Minute)
		s, err := w.d.service("hello")
		must(t, err)
		g := s.rec.Load().Generation
		if g <= 2 || s.usable() != nil {
			t.Errorf("generation %d, %v", g, s.usable())
		}
		w.await(w.deploy("hello", w.push("hello", "3", app{}), g, "k3").ID, "promoted")
		w.end()
		w.begin()
		if a := w.do("POST", "/v1/fsck", ""); !strings.Contains(a.body, `"ok": true`) {
			t.Errorf("%s", a.body)
		}
		if a := w.do("GET", "/v1/audit", ""); !strings.Contains(a.body, `"ok": true`) {
			t.Errorf("%s", a.body)
		}
	})
}

// A backup during which the retained bytes went is none.
func TestBackupDuringAPromotion(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		retained := strings.TrimPrefix(w.s.rec.Load().Rollback.digest(), "sha256:")
		err := w.data.backup(io.Discard, func(string) func() {
			return func() { must(t, os.RemoveAll(filepath.Join(w.s.images(), "blobs", "sha256", retained))) }
		}, time.Now())
		if err == nil || !strings.Contains(err.Error(), "begin again") {
			t.Errorf("%v", err)
		}
	})
}

// A backup during which the service was promoted holds the promoted operation beside a record of before, and no
// restore would take it: it is none, also if no retained bytes went.
func TestBackupOverAPromotion(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		time.Sleep(time.Minute)
		err := w.data.backup(io.Discard, func(string) func() {
			return func() {
				if w.s.rec.Load().Generation == 1 {
					w.promote("v2")
					time.Sleep(time.Minute)
				}
			}
		}, time.Now())
		if err == nil || !strings.Contains(err.Error(), "begin again") {
			t.Errorf("%v", err)
		}
	})
}

// A log that lost its end is not gone on with.
func TestAppendToALogThatLostItsEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "events.jsonl")
	must(t, appendDurably(path, 0, []byte("one\n")))
	must(t, os.WriteFile(path, nil, 0o600))
	if err := appendDurably(path, 4, []byte("two\n")); !errors.Is(err, errStorage) || !errors.Is(err, errCorrupt) {
		t.Errorf("%v", err)
	}
	if b, _ := os.ReadFile(path); len(b) != 0 {
		t.Errorf("%q was written", b)
	}
}

// What the evidence contradicts is refused.
func TestRestoreRefusesWhatWasPromotedLater(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		old, err := os.ReadFile(w.data.serviceFile("hello", "service.json"))
		must(t, err)
		w.promote("v2")
		w.stop()
		must(t, os.WriteFile(w.data.serviceFile("hello", "service.json.prev"), old, 0o600))
		must(t, os.WriteFile(w.data.serviceFile("hello", "service.json"), nil, 0o600))
		_, err = w.data.restoreNamed("services/hello/service.json", w.runningNow, time.Now())
		if err == nil || !strings.Contains(err.Error(), "promoted later") {
			t.Errorf("restored: %v", err)
		}
		if b, _ := os.ReadFile(w.data.serviceFile("hello", "service.json")); len(b) > 0 {
			t.Error("something was changed")
		}
		w.start()
	})
}

func TestRestoreWithADamagedEventLog(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		w.stop()
		log := w.data.serviceFile("hello", "events.jsonl")
		must(t, os.WriteFile(log, []byte("garbage\n"), 0o600))
		_, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, time.Now())
		must(t, err)
		w.last = nil
		w.start()
		w.until2("open", func() bool { return w.s.usable() == nil })
		w.expect(w.await(w.submit(w.push("v3", app{})).ID), promoted, "")
		if f := w.findings(); len(f) > 0 {
			t.Errorf("findings %+v", f)
		}
	})
}

func TestBackupAndRestore(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		current := w.s.rec.Load().Current.Image
		var b bytes.Buffer
		must(t, w.data.backup(&b, noLock, time.Now()))
		w.stop()

		// Cut off: nothing is changed.
		if _, err := w.data.restoreBackup(bytes.NewReader(b.Bytes()[:b.Len()/2]), w.runningNow, time.Now()); err == nil {
			t.Error("half a backup was restored")
		}
		// Onto whole records: left alone.
		done, err := w.data.restoreBackup(bytes.NewReader(b.Bytes()), w.runningNow, time.Now())
		must(t, err)
		if len(done) != 1 || !strings.Contains(done[0], "left alone") {
			t.Errorf("done %v", done)
		}
		// Onto an empty directory: everything, and the registry is not needed.
		must(t, os.RemoveAll(w.dir))
		must(t, os.Mkdir(w.dir, 0o700))
		d, err := lockData(w.dir, w.h.quadlets)
		must(t, err)
		done, err = d.restoreBackup(bytes.NewReader(b.Bytes()), w.runningNow, time.Now())
		d.close()
		must(t, err)
		if !slices.Contains(done, "hello: put back") {
			t.Errorf("done %v", done)
		}
		w.last = nil
		w.set(func() { w.h.registryDown = true })
		w.start()
		w.until("installed", func(r *record) bool { return r.Installed })
		w.expectRuns(current)
		if f := w.findings(); len(f) > 0 {
			t.Errorf("findings %+v", f)
		}
		req := submission{kind: "rollback", key: "r", hash: "h", actor: "local", expected: w.s.rec.Load().Generation}
		op, _, err := w.s.submit(req)
		must(t, err)
		w.expect(w.await(op.ID), promoted, "")
	})
}

func TestRestoreRefusesWhatIsNoBackup(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		var other bytes.Buffer
		tw := tar.NewWriter(&other)
		for name, text := range map[string]string{"id": strings.Repeat("a", 26) + "\n"} {
			must(t, tw.WriteHeader(&tar.Header{Name: name, Size: int64(len(text)), Mode: 0o600}))
			_, _ = io.WriteString(tw, text)
		}
		must(t, tw.WriteHeader(&tar.Header{Name: backupEnd, Mode: 0o600}))
		must(t, tw.Close())
		var outside bytes.Buffer
		tw = tar.NewWriter(&outside)
		must(t, tw.WriteHeader(&tar.Header{Name: "../evil", Mode: 0o600}))
		must(t, tw.Close())
		for name, b := range map[string][]byte{"of another Toad": other.Bytes(), "leads outside": outside.Bytes(), "no tar": []byte("hello"), "empty": nil} {
			if _, err := w.data.restoreBackup(bytes.NewReader(b), w.runningNow, time.Now()); err == nil {
				t.Errorf("%s was restored", name)
			}
		}
	})
}

func TestOneWriter(t *testing.T) { // E9
	quadlets := t.TempDir()
	a := t.TempDir()
	d, err := openData(a, quadlets)
	must(t, err)
	defer d.close()
	if _, err := openData(a, t.TempDir()); !errors.Is(err, errLocked) || !strings.Contains(err.Error(), a) || !strings.Contains(err.Error(), "process") {
		t.Errorf("a second one on the data directory: %v", err)
	}
	if _, err := openData(t.TempDir(), quadlets); !errors.Is(err, errLocked) || !strings.Contains(err.Error(), quadlets) {
		t.Errorf("a second one on the Quadlet directory: %v", err)
	}
}

func TestDataDirectoryIsRefusedWithWhatToDo(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	if _, err := openData(missing, t.TempDir()); err == nil || !strings.Contains(err.Error(), "make it") {
		t.Errorf("missing: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, nil, 0o600))
	if _, err := openData(file, t.TempDir()); err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("a file: %v", err)
	}
	dir, quadlets := t.TempDir(), t.TempDir()
	d, err := openData(dir, quadlets)
	must(t, err)
	must(t, makeDir(d.serviceFile("hello")))
	d.close()
	must(t, os.Remove(filepath.Join(dir, "id")))
	if _, err := openData(dir, quadlets); err == nil || !strings.Contains(err.Error(), "backup") {
		t.Errorf("the id is gone and services are there: %v", err)
	}
	must(t, os.WriteFile(filepath.Join(dir, "id"), []byte("torn"), 0o600))
	if _, err := openData(dir, quadlets); !errors.Is(err, errCorrupt) {
		t.Errorf("a torn id: %v", err)
	}
}

// lose removes service.json and its predecessor.
func (w *world) lose() {
	for _, name := range []string{"service.json", "service.json.prev"} {
		must(w.t, removeFile(w.data.serviceFile("hello", name)))
	}
	w.last = nil // the record's history begins anew
}

// restoreFrom is toad restore.
func (w *world) restoreFrom(backup []byte) error {
	d, err := lockData(w.dir, w.h.quadlets)
	must(w.t, err)
	defer d.close()
	_, err = d.restoreBackup(bytes.NewReader(backup), w.runningNow, w.s.now())
	return err
}

// What a newer binary wrote is never replaced by something older, asked for by name or not.
func TestNewerRecordsAreNotReplaced(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		_, _, err := w.s.issue("local", "ci", []string{"read"}, 0)
		must(t, err)
		time.Sleep(time.Minute)
		var b bytes.Buffer
		must(t, w.data.backup(&b, noLock, time.Now()))
		w.stop()
		for _, f := range []string{"service.json", "tokens.json", "revisions/1.json"} {
			path := w.data.serviceFile("hello", f)
			text, err := os.ReadFile(path)
			must(t, err)
			must(t, os.WriteFile(path, bytes.Replace(text, []byte(`"version": 1`), []byte(`"version": 2`), 1), 0o600))
		}
		before := snapshot(t, w.data.serviceFile("hello"))
		for _, f := range []string{"service.json", "tokens.json"} {
			if _, err := w.data.restoreNamed("services/hello/"+f, w.runningNow, w.s.now()); !errors.Is(err, errNewer) && !errors.Is(err, errCorrupt) {
				t.Errorf("%s: %v", f, err)
			}
		}
		if err := w.restoreFrom(b.Bytes()); !errors.Is(err, errNewer) {
			t.Errorf("a backup: %v", err)
		}
		if after := snapshot(t, w.data.serviceFile("hello")); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
		w.last = nil
		w.start()
	})
}

// cutAfter takes away every line of the event log behind the last of that type.
func (w *world) cutAfter(typ string) {
	log := w.data.serviceFile("hello", "events.jsonl")
	b, err := os.ReadFile(log)
	must(w.t, err)
	i := bytes.LastIndex(b, []byte(`"type":"`+typ+`"`))
	must(w.t, os.WriteFile(log, b[:i+bytes.IndexByte(b[i:], '\n')+1], 0o600))
}

// An event log that lost its end tells of requests that later ones undid. The record knows of both.
func TestRestoreWithACutLog(t *testing.T) {
	for name, tt := range map[string]struct {
		before func(w *world)
		cut    string
		ok     func(r *record) bool
	}{
		"suspended again": {func(w *world) {
			suspended(w)
			w.asked(w.s.resume("local"))
			time.Sleep(time.Minute)
			w.asked(w.s.suspend("local"))
		}, "resume", func(r *record) bool { return r.Suspended != nil }},
		"deployed again after its end": {func(w *world) {
			retired(w)
			w.back()
			w.promote("v3")
		}, "retire", func(r *record) bool { return r.Retired == nil && r.Current != nil }},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				tt.before(w)
				time.Sleep(time.Minute)
				must(t, w.s.tell("unit-lost", "something later"))
				ran := w.h.running("hello")
				w.stop()
				w.cutAfter(tt.cut)
				_, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now())
				must(t, err)
				w.last = nil
				w.start()
				time.Sleep(time.Minute)
				if r := w.s.rec.Load(); !tt.ok(r) {
					t.Errorf("suspended %+v, retired %+v, current %+v", r.Suspended, r.Retired, r.Current)
				}
				w.expectRuns(ran...)
			})
		})
	}
}

// A service that is held is held after a restore: what is still there is stopped on, and the current revision
// starts again if it was the one being stopped.
func TestRestoreKeepsTheHold(t *testing.T) {
	for _, damaged := range []string{"service.json", "events.jsonl"} {
		for _, candidate := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, candidate %v", damaged, candidate), func(t *testing.T) {
				inWorld(t, func(t *testing.T, w *world) {
					var image string
					if candidate {
						w.promote("v1")
						image = w.push("stuck", app{readyAfter: -1, unkillable: true})
						w.expect(w.await(w.submit(image).ID), hasFailed, "rollback_failed")
					} else {
						image = w.push("stuck", app{readyAfter: time.Second, unkillable: true})
						w.expect(w.await(w.submit(image).ID), promoted, "")
						w.until("installed", func(r *record) bool { return r.Installed })
						w.expect(w.await(w.submit(w.push("v2", app{})).ID), hasFailed, "termination_unconfirmed")
					}
					w.until("held", func(r *record) bool { return r.Held != nil })
					must(t, w.s.commit(func(*record) error { return nil })) // the predecessor knows of it, too
					w.stop()
					must(t, os.WriteFile(w.data.serviceFile("hello", damaged), []byte("garbage\n"), 0o600))
					_, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now())
					must(t, err)
					w.last = nil
					w.start()
					time.Sleep(time.Minute)
					if r := w.s.rec.Load(); r.Held == nil || r.Held.Candidate != candidate {
						t.Errorf("held: %+v", r.Held)
					}
					w.set(func() { w.h.apps[digestOf(image)].unkillable = false })
					w.h.reap("hello.service")
					w.until("the hold is over", func(r *record) bool { return r.Held == nil })
					time.Sleep(time.Minute)
					if candidate {
						w.expectRuns()
					} else {
						w.expectRuns(image)
					}
				})
			})
		}
	}
}

// An operation that was under way when the backup was made, and ended since: it has one end.
func TestRestoreOfAnOperationThatEndedSince(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		op := w.submit(w.push("v3", app{readyAfter: -1}))
		w.awaitState(op.ID, inProbation)
		var b bytes.Buffer
		must(t, w.data.backup(&b, noLock, time.Now()))
		w.expect(w.await(op.ID), rolledBack, "startup_deadline")
		time.Sleep(time.Minute)
		w.stop()
		w.lose()
		must(t, w.restoreFrom(b.Bytes()))
		w.start()
		time.Sleep(time.Minute)
		if got := w.s.op(); got.ID != op.ID || got.State != rolledBack || w.s.rec.Load().Held != nil {
			t.Errorf("the operation is %+v, held %+v", got, w.s.rec.Load().Held)
		}
	})
}

// The barrier that an operation raised after the backup was made is there after its restore, unless it was
// lifted.
func TestRestoreRaisesTheBarrierOfSince(t *testing.T) {
	for _, lifted := range []bool{false, true} {
		inWorld(t, func(t *testing.T, w *world) {
			w.set(func() { w.en.Barrier = true })
			settled(t, w)
			var b bytes.Buffer
			must(t, w.data.backup(&b, noLock, time.Now()))
			var op *operation
			for range 2 { // the second is accepted once the first is acknowledged
				if op != nil {
					w.asked(w.s.reconcile(op.ID, "local"))
				}
				op = w.await(w.submit(w.push("bad", app{exitAfter: time.Second})).ID)
				w.expect(op, rolledBack, "restart_budget")
				time.Sleep(time.Minute)
			}
			if lifted {
				w.asked(w.s.reconcile(op.ID, "local"))
			}
			w.stop()
			w.lose()
			must(t, w.restoreFrom(b.Bytes()))
			w.start()
			time.Sleep(time.Minute)
			if b := w.s.rec.Load().Barrier; lifted != (b == nil) || b != nil && b.Operation != op.ID {
				t.Errorf("lifted %v: the barrier is %+v", lifted, b)
			}
		})
	}
}

// The event log is damaged and the record, which is whole, is that of a promotion: a restore that is killed
// and made again never falls back to the record before.
func TestRestoreKilledLosesNoPromotion(t *testing.T) {
	for at := 0; ; at++ {
		steps := 0
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			defer func() { w.stop() }()
			w.promote("v1")
			w.set(func() {
				w.spoil = func(step, path string) error {
					w.mu.Lock()
					defer w.mu.Unlock()
					if w.last.Generation == 2 && step == "append" {
						return w.kill()
					}
					return nil
				}
			})
			w.submit(w.push("v2", app{}))
			<-w.died
			w.stop()
			must(t, os.WriteFile(w.data.serviceFile("hello", "events.jsonl"), []byte("garbage\n"), 0o600))
			testingOnlyBoundary = func(step, path string) error {
				if steps++; steps > at {
					return errors.New("killed")
				}
				return nil
			}
			_, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now())
			testingOnlyBoundary = nil
			if (err != nil) != (steps > at) {
				t.Fatalf("killed at %d of %d: %v", at, steps, err)
			}
			if err != nil {
				if _, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now().Add(time.Second)); err != nil {
					t.Logf("killed at %d: %v", at, err) // it had come to its end
				}
			}
			r, err := w.data.load("hello")
			must(t, err)
			if r.Current.Generation != 2 {
				t.Errorf("killed at %d: the current generation is %d", at, r.Current.Generation)
			}
			w.last = nil
			w.set(func() { w.spoil = nil })
			w.start()
		})
		if steps <= at {
			return
		}
	}
}

// A token that was revoked after the backup stays revoked when tokens.json is put back, though the log lost the
// line that says so, or did not get it yet.
func TestCutLogVouchesForNoToken(t *testing.T) {
	for _, later := range []bool{false, true} {
		inWorld(t, func(t *testing.T, w *world) {
			w.promote("v1")
			rec, _, err := w.s.issue("local", "ci", []string{"read"}, 0)
			must(t, err)
			var b bytes.Buffer
			must(t, w.data.backup(&b, noLock, time.Now()))
			must(t, w.s.revokeAll("local"))
			if later {
				must(t, w.s.tell("unit-lost", "something later"))
			}
			w.stop()
			w.cutAfter("token-issued")
			for _, name := range []string{"tokens.json", "tokens.json.prev"} {
				must(t, os.Remove(w.data.serviceFile("hello", name)))
			}
			must(t, w.restoreFrom(b.Bytes()))
			f, err := w.data.tokens("hello", "tokens.json")
			must(t, err)
			if len(f.Tokens) != 1 || f.Tokens[0].ID != rec.ID || f.Tokens[0].RevokedAt == nil {
				t.Errorf("tokens: %+v", f.Tokens)
			}
			w.last = nil
			w.start()
		})
	}
}

// What never changes comes back out of a backup also beside a whole service.json, which is what fsck --restore
// says of it; what was pruned stays away.
func TestDamagedRecordsComeBackFromTheBackup(t *testing.T) {
	for _, whole := range []bool{true, false} {
		inWorld(t, func(t *testing.T, w *world) {
			settled(t, w)
			failed := w.await(w.submit(w.push("bad", app{exitAfter: time.Second})).ID)
			time.Sleep(time.Minute)
			current := w.s.rec.Load().Current
			var b bytes.Buffer
			must(t, w.data.backup(&b, noLock, time.Now()))
			w.stop()
			file := func(name string) string { return w.data.serviceFile("hello", name) }
			for _, name := range []string{"revisions/2.json", "revisions/1.container", "operations/" + current.Operation + ".json"} {
				must(t, os.WriteFile(file(name), []byte("garbage"), 0o600))
			}
			must(t, os.Remove(w.data.keyPath("hello", "key-1")))
			if whole { // that one is as if it had been pruned
				for _, name := range []string{"revisions/3.json", "revisions/3.container", "operations/" + failed.ID + ".json"} {
					must(t, os.Remove(file(name)))
				}
			} else {
				must(t, os.WriteFile(file("service.json"), []byte("garbage"), 0o600))
			}
			must(t, w.restoreFrom(b.Bytes()))
			if _, err := os.Stat(file("revisions/3.json")); (err == nil) == whole {
				t.Errorf("whole %v: the pruned revision: %v", whole, err)
			}
			if k, err := w.data.key("hello", "key-1"); err != nil || k.State != promoted {
				t.Errorf("whole %v: the key is %+v, %v", whole, k, err)
			}
			w.last = nil
			w.start()
			time.Sleep(time.Minute)
			if err := w.s.usable(); err != nil {
				t.Fatalf("whole %v: closed: %v", whole, errors.Unwrap(err))
			}
			w.expectRuns(current.Image)
			if f := w.findings(); len(f) > 0 {
				t.Errorf("whole %v: findings %+v", whole, f)
			}
			w.keys = 100
			w.expect(w.await(w.submit(w.push("v4", app{})).ID), promoted, "")
		})
	}
}

// The candidate's own revision is damaged while its operation is under way: the service is closed, and a restore
// of its record by name ends the operation and holds what may run until it is gone.
func TestRestoreWithoutTheCandidatesRevision(t *testing.T) {
	for name, tt := range map[string]struct {
		first   bool   // there is no current revision
		damaged string // beside the revision
	}{"upgrade": {false, ""}, "first": {true, ""}, "and the record": {false, "service.json"}} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				var ran []string
				if !tt.first {
					ran = []string{w.promote("v1").Candidate.Image}
				}
				op := w.submit(w.push("v2", app{readyAfter: -1}))
				w.awaitState(op.ID, inProbation)
				time.Sleep(5 * time.Second)
				w.stop()
				must(t, os.WriteFile(w.data.serviceFile("hello", "revisions", fmt.Sprint(op.Candidate.Generation)+".json"), nil, 0o600))
				if tt.damaged != "" {
					must(t, os.WriteFile(w.data.serviceFile("hello", tt.damaged), nil, 0o600))
				}
				w.start()
				time.Sleep(time.Minute)
				if w.s.usable() == nil {
					t.Error("the service is open")
				}
				w.stop()
				_, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now())
				must(t, err)
				w.last = nil
				w.start()
				time.Sleep(time.Minute)
				w.expect(w.s.op(), hasFailed, "interrupted")
				if !tt.first {
					w.expectRuns(ran...)
				}
				w.keys = 100
				next := w.await(w.submit(w.push("v3", app{})).ID)
				w.expect(next, promoted, "")
				w.expectRuns(next.Candidate.Image)
				if _, err := w.data.restoreNamed("services/hello/service.json", w.runningNow, w.s.now()); err == nil {
					t.Error("a whole record was put back")
				}
			})
		})
	}
}
