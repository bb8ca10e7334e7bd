package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"
)

// The golden records of version 1, one for every state an operation can be in and for what a service can
// be besides. -update writes them anew from the real rollout; they are never deleted once released.
var goldenRecords = map[string]func(t *testing.T, w *world){
	"fresh":      func(t *testing.T, w *world) { must(t, w.s.commit(func(*record) error { return nil })) },
	"preparing":  inState(preparing),
	"activating": inState(activating),
	"probation":  inState(inProbation),
	"promoting": func(t *testing.T, w *world) { // its last look takes long enough for Toad to be stopped in it
		w.promote("v1")
		if op := w.awaitState(w.submit(w.push("v2", app{slow: 500 * time.Millisecond})).ID, promoting); op.State != promoting {
			t.Fatalf("it is %s", op.State)
		}
	},
	"rolling-back": func(t *testing.T, w *world) {
		w.promote("v1")
		w.awaitState(w.submit(w.push("bad", app{exitAfter: time.Second})).ID, rollingBack)
	},
	"promoted": func(t *testing.T, w *world) { settled(t, w) },
	"rolled-back": func(t *testing.T, w *world) {
		w.promote("v1")
		w.expect(w.await(w.submit(w.push("bad", app{exitAfter: time.Second})).ID), rolledBack, "restart_budget")
	},
	"failed": func(t *testing.T, w *world) {
		w.expect(w.await(w.submit(w.push("bad", app{readyAfter: -1})).ID), hasFailed, "no_rollback_target")
	},
	"failed-rollback": func(t *testing.T, w *world) {
		first := w.promote("v1")
		w.set(func() { w.h.apps[first.Candidate.digest()].readyAfter = -1 })
		w.expect(w.await(w.submit(w.push("bad", app{exitAfter: time.Second})).ID), hasFailed, "rollback_failed")
	},
	"tokens": func(t *testing.T, w *world) {
		_, _, err := w.s.issue("local", "ci of hello", []string{"read", "deploy"}, 720*time.Hour)
		must(t, err)
		gone, _, err := w.s.issue("local", "lost", []string{"read"}, 0)
		must(t, err)
		w.s.index.get(gone.ID).used.Store(w.s.now().UnixMilli())
		w.s.saveUses()
		time.Sleep(time.Minute)
		must(t, w.s.revoke("local", func(k *token) bool { return k.ID == gone.ID }))
	},
	"held": func(t *testing.T, w *world) {
		w.expect(w.await(w.submit(w.push("stuck", app{unkillable: true})).ID), promoted, "")
		w.expect(w.await(w.submit(w.push("v2", app{})).ID), hasFailed, "termination_unconfirmed")
	},
	"suspended": func(t *testing.T, w *world) { suspended(w) },
	"resuming": func(t *testing.T, w *world) {
		suspended(w)
		w.asked(w.s.resume("local"))
	},
	"barrier": func(t *testing.T, w *world) { barred(w) },
	"retired": func(t *testing.T, w *world) { retired(w) },
}

func inState(st state) func(t *testing.T, w *world) {
	return func(t *testing.T, w *world) {
		w.promote("v1")
		w.awaitState(w.submit(w.push("v2", app{readyAfter: time.Second})).ID, st)
	}
}

const goldenDir = "testdata/state/v1"

func TestGoldenRecords(t *testing.T) {
	if *update {
		for name, scenario := range goldenRecords {
			cryptotest.SetGlobalRandom(t, 1)
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				scenario(t, w)
				w.stop()
				take := func(to, from string) {
					b, err := os.ReadFile(w.data.serviceFile("hello", from))
					must(t, err)
					must(t, os.MkdirAll(goldenDir, 0o755))
					must(t, os.WriteFile(filepath.Join(goldenDir, to), b, 0o644))
				}
				take("service-"+name+".json", "service.json")
				if name == "tokens" {
					take("tokens.json", "tokens.json")
				}
				if name == "promoted" {
					op := w.s.op()
					take("revision.json", "revisions/2.json")
					take("revision.container", "revisions/2.container")
					take("operation.json", "operations/"+op.ID+".json")
					take("operation.log", "operations/"+op.ID+".log")
					take("events.jsonl", "events.jsonl")
					key, err := filepath.Rel(w.data.serviceFile("hello"), w.data.keyPath("hello", op.Key))
					must(t, err)
					take("key.json", key)
					must(t, w.data.ownEvent("start", "v1.0.0"))
					take("events.head.json", "../../events.head.json")
				}
			})
		}
	}
	files, err := filepath.Glob(filepath.Join(goldenDir, "*.json"))
	must(t, err)
	seen := map[string]bool{}
	for _, path := range files {
		b, err := os.ReadFile(path)
		must(t, err)
		var v any
		name := strings.TrimSuffix(filepath.Base(path), ".json")
		seen[name] = true
		switch {
		case strings.HasPrefix(name, "service-"):
			v = &record{}
		case name == "revision":
			v = &revision{}
		case name == "operation":
			v = &archived{}
		case name == "key":
			v = &keyFile{}
		case name == "tokens":
			v = &tokenFile{}
		case name == "events.head":
			v = &ownRecord{}
		}
		if err := decodeRecord(b, v); err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		if r, ok := v.(*record); ok {
			if err := r.check(); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		again, err := encodeRecord(v)
		must(t, err)
		if string(again) != string(b) {
			t.Errorf("%s is not what it decodes to", path)
		}
	}
	for name := range goldenRecords {
		if !seen["service-"+name] {
			t.Errorf("there is no golden record %s: run with -update", name)
		}
	}
	if _, err := verifyEvents(filepath.Join(goldenDir, "events.jsonl")); err != nil {
		t.Errorf("golden events: %v", err)
	}
}

// There is a golden record of every state.
func TestGoldenRecordsHaveEveryState(t *testing.T) {
	seen := map[state]bool{}
	for _, b := range goldenFiles(t, 0) {
		r := &record{}
		must(t, decodeRecord(b, r))
		if r.Operation != nil {
			seen[r.Operation.State] = true
		}
	}
	for st := range nextStates {
		if !seen[st] {
			t.Errorf("there is no golden record in state %s", st)
		}
	}
}

// A Toad that finds a record of a newer version, which a newer Toad wrote, leaves it and its predecessor as
// they are for as long as it runs, and takes no deployment; what runs goes on running. Another service's
// records are no matter of it.
func TestNewerRecordsAreLeftAsTheyAre(t *testing.T) {
	for _, tt := range []struct {
		file   string // of the service's directory
		closed bool
	}{
		{"service.json", true}, {"tokens.json", true}, {"revisions/2.json", true}, {"operations/*.json", false}, {"keys/*.json", false}, {"../../events.head.json", false},
	} {
		t.Run(strings.Trim(tt.file, "./"), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				settled(t, w)
				_, _, err := w.s.issue("local", "ci", []string{"read"}, 0)
				must(t, err)
				must(t, w.data.ownEvent("start", "v1.0.0"))
				image := w.s.rec.Load().Current.Image
				w.stop()
				paths, err := filepath.Glob(w.data.serviceFile("hello", tt.file))
				must(t, err)
				kept := map[string]string{}
				for _, path := range paths {
					b := strings.Replace(string(readFile(t, path)), `"version": 1`, `"version": 2`, 1)
					b = strings.Replace(b, "  \"sha256\": ", "  \"of_tomorrow\": true,\n  \"sha256\": ", 1)
					must(t, os.WriteFile(path, resealed([]byte(b)), 0o600))
					for _, p := range []string{path, path + ".prev"} {
						if b, err := os.ReadFile(p); err == nil {
							kept[p] = string(b)
						}
					}
				}
				if len(kept) == 0 {
					t.Fatal("there is no such record")
				}
				var mutations, now []string
				w.set(func() { mutations = slices.Clone(w.h.mutations) })
				w.start()
				_ = w.data.ownEvent("stop", "v0.9.0")
				time.Sleep(time.Hour)
				w.s.saveUses()
				_, _, err = w.s.submit(submission{kind: "deploy", image: w.push("v3", app{}), key: "new", hash: "h", actor: "local", expected: 2})
				var e *apiError
				if closed := errors.As(err, &e) && e.Code == "state_unavailable"; closed != tt.closed {
					t.Errorf("closed for admission: %v (%v), want %v", closed, err, tt.closed)
				}
				if tt.closed {
					time.Sleep(time.Hour)
					w.expectRuns(image)
					w.set(func() { now = slices.Clone(w.h.mutations) })
					if len(now) != len(mutations) {
						t.Errorf("the host was changed: %q", now[len(mutations):])
					}
				} else {
					w.expect(w.await(w.s.op().ID), promoted, "")
				}
				w.restart() // and once more, as whoever supervises it would
				time.Sleep(time.Minute)
				for path, was := range kept {
					if b, err := os.ReadFile(path); err != nil || string(b) != was {
						t.Errorf("%s is not what it was: %v\n%s", path, err, b)
					}
				}
				found := w.findings()
				for _, path := range paths {
					rel, err := filepath.Rel(w.dir, path)
					must(t, err)
					if !slices.ContainsFunc(found, func(f finding) bool {
						return (f.File == rel || strings.Contains(f.Problem, path)) && strings.Contains(f.Problem, "newer")
					}) {
						t.Errorf("fsck does not say it of %s: %+v", rel, found)
					}
				}
			})
		})
	}
}

// The page on the state directory shows the golden records as they are.
func TestStatePageShowsGoldenRecords(t *testing.T) {
	page, err := os.ReadFile("STATE.md")
	must(t, err)
	blocks := regexp.MustCompile("(?s)<!-- (testdata/[^ ]+) -->\n```[a-z]*\n(.*?)```").FindAllStringSubmatch(string(page), -1)
	if len(blocks) < 4 {
		t.Fatalf("%d examples", len(blocks))
	}
	for _, m := range blocks {
		b, err := os.ReadFile(m[1])
		must(t, err)
		if string(b) != m[2] {
			t.Errorf("the example of %s differs from the file", m[1])
		}
	}
}

// A failure of each durable step of a write is an error that says so, and leaves the old record whole.
func TestWriteFailsAtEachStep(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "service.json")
	old := &keyFile{Version: 1, Operation: strings.Repeat("a", 26), RequestHash: "h", State: promoted}
	must(t, writeRecord(path, old))
	before, err := os.ReadFile(path)
	must(t, err)
	var steps []string
	defer func() { testingOnlyBoundary = nil }()
	testingOnlyBoundary = func(step, _ string) error { steps = append(steps, step); return nil }
	must(t, writeRecord(path, old))
	if want := []string{"keep", "write", "replace", "syncdir"}; !slices.Equal(steps, want) {
		t.Fatalf("steps %v, want %v", steps, want)
	}
	next := *old
	next.State = rolledBack
	for _, at := range []string{"keep", "write", "replace"} {
		testingOnlyBoundary = func(step, _ string) error {
			if step == at {
				return syscall.EIO
			}
			return nil
		}
		if err := writeRecord(path, &next); !errors.Is(err, errStorage) || !errors.Is(err, syscall.EIO) {
			t.Errorf("%s: %v", at, err)
		}
		if b, _ := os.ReadFile(path); string(b) != string(before) {
			t.Errorf("%s: the old record is not whole", at)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
			t.Errorf("%s: left %v", at, left)
		}
	}
	testingOnlyBoundary = func(step, _ string) error {
		if step == "syncdir" {
			return syscall.EIO
		}
		return nil
	}
	if err := writeRecord(path, &next); !errors.Is(err, errStorage) {
		t.Errorf("syncdir: %v", err)
	}
}

// Disk full at each durable step of a deployment: a rollout under way still ends, admission stops, the
// workload runs on, and everything goes on by itself once there is space again.
func TestDiskFull(t *testing.T) { // E8
	for _, step := range []string{"keep", "write", "replace", "syncdir", "append", "reserve"} {
		t.Run(step, func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				w.set(func() {
					w.spoil = func(at, path string) error {
						if at == step && strings.HasPrefix(path, w.dir) {
							return syscall.ENOSPC
						}
						return nil
					}
				})
				if step == "reserve" {
					must(t, os.Remove(filepath.Join(w.dir, "reserve")))
				}
				_, _, err := w.s.submit(w.request(w.push("v2", app{}), "full"))
				var e *apiError
				if !errors.As(err, &e) || e.Code != "state_unavailable" {
					t.Fatalf("a full disk takes a deployment: %v", err)
				}
				time.Sleep(time.Minute)
				w.expectRuns(first.Candidate.Image)
				w.set(func() { w.spoil = nil })
				w.until2("usable again", func() bool { return w.s.usable() == nil })
				if op := w.s.rec.Load().active(); op != nil { // the write was lost to us, not to the disk
					w.await(op.ID)
				}
				w.promote("v3")
			})
		})
	}
}

// The disk fills up in the middle of a rollout: the reserve lets it end.
func TestDiskFillsDuringARollout(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		w.promote("v1")
		op := w.submit(w.push("bad", app{readyAfter: -1}))
		w.awaitState(op.ID, inProbation)
		w.set(func() {
			w.spoil = func(step, path string) error {
				if _, err := os.Stat(filepath.Join(w.dir, "reserve")); err == nil && step == "write" && strings.HasPrefix(path, w.dir) {
					return syscall.ENOSPC
				}
				return nil
			}
		})
		w.expect(w.await(op.ID), rolledBack, "startup_deadline")
	})
}

// The commit of a promotion may find the room of the record it replaces. What follows from it needs more,
// and gets the reserve: an operation that ended on a full disk is archived, and its unit installed.
func TestDiskIsFullAfterAPromotion(t *testing.T) {
	for _, what := range []string{"/operations/", "/keys/", "/images/"} {
		t.Run(strings.Trim(what, "/"), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				w.promote("v1")
				op := w.submit(w.push("v2", app{}))
				w.awaitState(op.ID, inProbation)
				w.set(func() {
					w.spoil = func(step, path string) error {
						if _, err := os.Stat(filepath.Join(w.dir, "reserve")); err == nil && step == "write" && strings.Contains(path, what) {
							return syscall.ENOSPC
						}
						return nil
					}
				})
				w.expect(w.await(op.ID), promoted, "")
				time.Sleep(5 * time.Second)
				if !w.s.rec.Load().Installed {
					t.Error("the promoted unit is not installed")
				}
				if _, err := w.data.key("hello", op.Key); err != nil {
					t.Errorf("the operation is not archived: %v", err)
				}
				must(t, w.s.usable())
			})
		})
	}
}

// The disk fills up before anything was touched: the operation waits for space until its deadline, and ends.
func TestDiskFillsWhilePreparing(t *testing.T) {
	for _, what := range []string{"/revisions/", "/images/"} {
		t.Run(strings.Trim(what, "/"), func(t *testing.T) {
			inWorld(t, func(t *testing.T, w *world) {
				first := w.promote("v1")
				w.set(func() {
					w.spoil = func(step, path string) error {
						if step == "write" && strings.Contains(path, what) {
							return syscall.ENOSPC
						}
						return nil
					}
				})
				op := w.submit(w.push("v2", app{}))
				w.expect(w.await(op.ID), hasFailed, "state_unavailable")
				if d := w.s.op().FinishedAt.Sub(op.CreatedAt); d < 9*time.Minute || d > 11*time.Minute {
					t.Errorf("it ended after %s, the deadline was 10m", d)
				}
				w.expectRuns(first.Candidate.Image)
				w.set(func() { w.spoil = nil })
				w.until2("usable again", func() bool { return w.s.usable() == nil })
				w.promote("v3")
			})
		})
	}
}

func TestSweepRemovesWhatWasHalfWritten(t *testing.T) {
	dir, quadlets := t.TempDir(), t.TempDir()
	d, err := openData(dir, quadlets)
	must(t, err)
	must(t, makeDir(d.serviceFile("hello", "revisions")))
	d.close()
	half := filepath.Join(dir, "services", "hello", ".service.json1234567890")
	link := filepath.Join(dir, "services", "hello", "service.json.prev.new")
	keep := filepath.Join(dir, "services", "hello", "service.json")
	for _, p := range []string{half, link, keep} {
		must(t, os.WriteFile(p, nil, 0o600))
	}
	d, err = openData(dir, quadlets)
	must(t, err)
	d.close()
	for _, p := range []string{half, link} {
		if _, err := os.Lstat(p); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there", p)
		}
	}
	if _, err := os.Lstat(keep); err != nil {
		t.Error(err)
	}
}

func TestOperationIDsSortByTime(t *testing.T) {
	now := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	a, b := newOperationID(now), newOperationID(now.Add(time.Millisecond))
	if !operationID.MatchString(a) || a >= b || !idTime(a).Equal(now) {
		t.Errorf("%s %s %s", a, b, idTime(a))
	}
}

func TestPruneKeepsWhatIsReferredTo(t *testing.T) {
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		r := w.s.rec.Load()
		old := *w.s.op()
		now := w.s.now()
		for i := range keepOperations + 5 { // long ago: older than any age
			op := old
			op.ID = newOperationID(now.Add(-2*keepAge + time.Duration(i)*time.Second))
			op.Key = "" // its key is never pruned anyway
			op.Candidate.Generation = 0
			must(t, writeRecord(w.data.serviceFile("hello", "operations", op.ID+".json"), &archived{Version: 1, Service: "hello", Operation: op}))
		}
		must(t, w.data.prune(r, now))
		ids, err := w.data.operationIDs("hello")
		must(t, err)
		if len(ids) != keepOperations {
			t.Errorf("%d operations are kept, want %d", len(ids), keepOperations)
		}
		for _, p := range []*promotedRevision{r.Current, r.Rollback} {
			if _, err := w.data.revision("hello", p.Generation); err != nil {
				t.Error(err)
			}
			if _, err := w.data.operation("hello", p.Operation); err != nil {
				t.Error(err)
			}
		}
	})
}
