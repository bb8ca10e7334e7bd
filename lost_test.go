package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// An empty volume is mounted where the data was, and the host is as alive as before: what runs is somebody
// else's to this Toad. It deploys nothing over it and touches nothing, restarts included; with a backup put
// back, all goes on.
func TestLostDataDirectory(t *testing.T) { // E9
	inWorld(t, func(t *testing.T, w *world) {
		settled(t, w)
		image := w.s.rec.Load().Current.Image
		var backup bytes.Buffer
		must(t, w.data.backup(&backup, noLock, time.Now()))
		w.stop()
		unit, quadletsBefore := w.s.unitPath(w.en.Unit), snapshot(t, w.h.quadlets)
		must(t, os.RemoveAll(w.dir))
		must(t, os.Mkdir(w.dir, 0o700))
		w.last = nil
		var containers, mutations []string
		ids := func() (ids []string) {
			list, err := w.runningNow("hello")
			must(t, err)
			for _, c := range list {
				ids = append(ids, c.ID+" "+c.Status)
			}
			return ids
		}
		containers = ids()
		w.set(func() { mutations = slices.Clone(w.h.mutations) })
		w.start()
		time.Sleep(time.Hour)
		if r := w.s.rec.Load(); r.Current != nil || r.Generation != 0 {
			t.Errorf("it has a current revision: %+v", r)
		}
		if h := w.s.view(true).Health; h.State != "foreign" && h.State != "unknown" {
			t.Errorf("it is said to be %s", h.State)
		}
		for i, image := range []string{image, w.push("v3", app{})} { // of what runs, and of another
			op := w.await(w.submit(image).ID)
			w.expect(op, hasFailed, "unit_not_owned")
			if op.Candidate.Generation != int64(i+1) {
				t.Errorf("its generation is %d", op.Candidate.Generation)
			}
			time.Sleep(time.Hour)
		}
		w.restart()
		time.Sleep(time.Hour)
		// Nothing that an operator may ask for reaches it either.
		var e *apiError
		if _, err := w.s.suspend("local"); !errors.As(err, &e) {
			t.Errorf("it is suspended: %v", err)
		}
		w.gone()
		w.asked(w.s.retire(0, "local"))
		time.Sleep(time.Hour)
		if r := w.s.rec.Load().Retired; r.Done || !slices.Equal(r.Remains, []string{"the unit hello.container exists and was not written by this Toad"}) {
			t.Errorf("it is retired: %+v", r)
		}
		w.expectRuns(image)
		if got := ids(); !slices.Equal(got, containers) {
			t.Errorf("containers %v, before %v", got, containers)
		}
		if snapshot(t, w.h.quadlets) != quadletsBefore {
			t.Errorf("the Quadlet directory was changed: %s", readFile(t, unit))
		}
		var now []string
		w.set(func() { now = slices.Clone(w.h.mutations) })
		for _, m := range now[len(mutations):] {
			if m != "load image" { // of the candidate, before anything that runs is touched
				t.Errorf("the host was changed: %s", m)
			}
		}

		// A backup is put back: not over what the new one began, which has another id, but where nothing is.
		w.stop()
		restore := func() error {
			d, err := lockData(w.dir, w.h.quadlets)
			must(t, err)
			defer d.close()
			_, err = d.restoreBackup(bytes.NewReader(backup.Bytes()), w.runningNow, time.Now())
			return err
		}
		if err := restore(); err == nil {
			t.Error("the backup was restored over another Toad's records")
		}
		must(t, os.RemoveAll(w.dir))
		must(t, os.Mkdir(w.dir, 0o700))
		must(t, restore())
		w.back()
		w.last = nil
		w.start()
		time.Sleep(time.Minute)
		if got := ids(); !slices.Equal(got, containers) {
			t.Errorf("containers %v, before %v", got, containers)
		}
		w.promote("v4")
	})
}

// A backup is restored on a host that never saw the service: no unit, no container, no image in Podman, and no
// registry. Toad puts the current revision's unit and image in place and starts it, as after a boot; nothing
// is promoted by it, and the retained revision can be deployed again.
func TestBackupOntoANewHost(t *testing.T) { // E9
	for _, underWay := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var backup bytes.Buffer
			old := newWorld(t)
			settled(t, old)
			current, retained := *old.s.rec.Load().Current, *old.s.rec.Load().Rollback
			_, secret, err := old.s.issue("local", "ci", []string{"deploy"}, 0)
			must(t, err)
			var op *operation
			if underWay {
				op = old.awaitState(old.submit(old.push("v3", app{readyAfter: time.Second})).ID, inProbation)
			}
			must(t, old.data.backup(&backup, noLock, time.Now()))
			old.stop()

			h := newFakeHost(t)
			h.apps, h.registryDown, h.kernelBoot = old.h.apps, true, "boot of another host"
			w := &world{t: t, h: h, en: old.en, dir: filepath.Join(t.TempDir(), "data"), starts: map[string]int{}}
			must(t, os.Mkdir(w.dir, 0o700))
			h.data = w.dir
			before := snapshot(t, h.quadlets)
			d, err := lockData(w.dir, h.quadlets)
			must(t, err)
			done, err := d.restoreBackup(bytes.NewReader(backup.Bytes()), w.runningNow, time.Now())
			d.close()
			must(t, err)
			if !slices.Equal(done, []string{"id", "hello: put back"}) {
				t.Errorf("done: %q", done)
			}
			must(t, os.Remove(filepath.Join(h.quadlets, ".toad.lock")))
			if len(h.mutations) > 0 || snapshot(t, h.quadlets) != before {
				t.Errorf("the restore touched the host: %q", h.mutations)
			}

			w.start()
			defer func() { w.stop() }()
			w.until("installed", func(r *record) bool { return r.Installed })
			time.Sleep(time.Minute)
			w.expectRuns(current.Image)
			w.health("running")
			r := w.s.rec.Load()
			if r.Current.Image != current.Image || r.Rollback == nil || r.Rollback.Image != retained.Image || r.Generation <= current.Generation || r.NextGeneration <= r.Generation {
				t.Errorf("generation %d, next %d, current %+v, retained %+v", r.Generation, r.NextGeneration, r.Current, r.Rollback)
			}
			if underWay {
				got := r.Operation
				if got.ID != op.ID {
					if got, err = w.data.operation("hello", op.ID); err != nil {
						t.Fatal(err)
					}
				}
				w.expect(got, hasFailed, "interrupted")
			}
			if f := w.findings(); len(f) > 0 {
				t.Errorf("findings: %+v", f)
			}
			if got := w.s.index.holder(map[string][]string{"Authorization": {"Bearer " + secret}}); got != nil && got.valid(w.s.now()) {
				t.Error("a token of the backup is valid: nobody knows whether it was revoked since")
			}

			// A request from before is stale, and the same revision and the retained one can be deployed.
			_, _, err = w.s.submit(submission{kind: "deploy", image: current.Image, key: "old", hash: "h", actor: "local", expected: current.Generation})
			var e *apiError
			if !errors.As(err, &e) || e.Code != "stale_generation" {
				t.Errorf("a request of before is answered %v", err)
			}
			w.keys = 100
			w.expect(w.await(w.submit(current.Image).ID), promoted, "")
			w.expectRuns(current.Image)
			back, _, err := w.s.submit(submission{kind: "rollback", key: "back", hash: "h", actor: "local", expected: w.s.rec.Load().Generation})
			must(t, err)
			w.expect(w.await(back.ID), promoted, "")
			w.chain()
		})
	}
}
