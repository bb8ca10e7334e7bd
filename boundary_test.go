package main

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

var everyBoundary = flag.Bool("every-boundary", false, "meet every boundary in every way, not a sample that differs by date")

// scenarios are the lives of a service whose every boundary is met. before leaves the service as the
// scenario needs it, begin starts what is explored; it may be called again after a kill that came before
// the acceptance.
var scenarios = []struct {
	name   string
	before func(w *world)
	begin  func(w *world)
	during func(w *world) // what happens while it runs, if Toad lives
}{
	{"first deployment", nil, deploys(app{readyAfter: time.Second}), nil},
	{"upgrade", promotes, deploys(app{readyAfter: time.Second}), nil},
	{"same digest again", promotes, func(w *world) { w.deploy(w.push("v1", app{readyAfter: time.Second})) }, nil},
	{"never ready", promotes, deploys(app{readyAfter: -1}), nil},
	{"never ready, no target", nil, deploys(app{readyAfter: -1}), nil},
	{"crash loop", promotes, deploys(app{exitAfter: time.Second}), nil},
	{"ready then restart", promotes, deploys(app{readyAfter: time.Second, exitAfter: 10 * time.Second, exitOnce: true}), nil},
	{"stop timeout", func(w *world) {
		w.expect(w.await(w.submit(w.push("stuck", app{unkillable: true})).ID), promoted, "")
		w.until("installed", func(r *record) bool { return r.Installed })
	}, deploys(app{}), func(w *world) { time.Sleep(2 * time.Minute); w.h.reap("hello.service") }},
	{"fetch failure", promotes, func(w *world) {
		w.set(func() { w.h.registryDown = true })
		deploys(app{})(w)
	}, nil},
	{"requested rollback", promotes, deploys(app{}), func(w *world) {
		time.Sleep(5 * time.Second)
		if op := w.s.op(); op != nil {
			_, _, _ = w.s.requestRollback(op.ID, "local")
		}
	}},
	{"failing rollback", func(w *world) {
		promotes(w)
		w.set(func() { w.h.apps[w.s.rec.Load().Current.digest()].readyAfter = -1 })
	}, deploys(app{exitAfter: time.Second}), nil},
	{"suspension", promotes, suspends, nil},
	{"suspension that cannot be confirmed", func(w *world) {
		w.expect(w.await(w.submit(w.push("stuck", app{readyAfter: time.Second, unkillable: true})).ID), promoted, "")
		w.until("installed", func(r *record) bool { return r.Installed })
	}, suspends, func(w *world) { time.Sleep(2 * time.Minute); w.h.reap("hello.service") }},
	{"suspension of a held service", func(w *world) {
		w.expect(w.await(w.submit(w.push("stuck", app{readyAfter: time.Second, unkillable: true})).ID), promoted, "")
		w.until("installed", func(r *record) bool { return r.Installed })
		w.expect(w.await(w.submit(w.push("v2", app{})).ID), hasFailed, "termination_unconfirmed")
	}, suspends, func(w *world) { time.Sleep(2 * time.Minute); w.h.reap("hello.service") }},
	{"resumption", func(w *world) {
		promotes(w)
		suspends(w)
		w.health("stopped")
	}, func(w *world) { _, _ = w.s.resume("local") }, nil},
	{"retirement", func(w *world) {
		promotes(w)
		w.gone()
	}, func(w *world) { _, _ = w.s.retire(w.s.rec.Load().Generation, "local") }, nil},
}

func suspends(w *world) { _, _ = w.s.suspend("local") }

func promotes(w *world) {
	w.expect(w.await(w.submit(w.push("v1", app{readyAfter: time.Second})).ID), promoted, "")
	w.until("installed", func(r *record) bool { return r.Installed })
	time.Sleep(time.Second)
}

func deploys(a app) func(w *world) {
	return func(w *world) { w.deploy(w.push("candidate", a)) }
}

// run plays one scenario while the boundaries are counted or one of them is met. It ends when nothing
// more is expected, or Toad is dead.
func (w *world) play(begin, during func(w *world)) {
	begin(w)
	if during != nil && w.alive() == nil {
		during(w)
	}
	for end := time.Now().Add(10 * time.Minute); w.alive() == nil && time.Now().Before(end); time.Sleep(time.Second) {
		if r := w.s.rec.Load(); w.s.usable() == nil && w.s.stale() == nil && w.quiet(r) {
			time.Sleep(2 * time.Second) // what follows from the end
			return
		}
	}
}

// quiet tells that a service has nothing left to do.
func (w *world) quiet(r *record) bool {
	switch r.duty() {
	case watching:
		return r.Current == nil || r.Installed
	case stayingDown:
		return w.s.view(true).Health.State == "stopped"
	}
	return false
}

// boundariesOf lists every boundary of a scenario, each place once, in order.
func boundariesOf(t *testing.T, i int) []string {
	sc := scenarios[i]
	var names []string
	f := explore(t, func(w *world) {
		if sc.before != nil {
			sc.before(w)
		}
		w.arm(0, "", nil)
		w.set(func() {
			w.seen = func(name string) {
				if !slices.Contains(names, name) {
					names = append(names, name)
				}
			}
		})
		w.play(sc.begin, sc.during)
		w.disarm()
	})
	if len(f.list) > 0 {
		t.Fatalf("%s: %s", sc.name, strings.Join(f.list, "\n"))
	}
	return names
}

// variants are the ways in which a boundary is met and what comes after.
var variants = []struct {
	name    string
	meet    string
	again   bool          // killed again at the same place
	reboot  bool          // the host is booted
	clock   time.Duration // by which the wall clock moved over the boot
	another bool          // with another boot id of the kernel
}{
	{"not applied", notApplied, false, false, 0, false},
	{"applied and not heard", notHeard, false, false, 0, false},
	{"an error though applied", errorApplied, false, false, 0, false},
	{"killed again at the same place", notApplied, true, false, 0, false},
	{"booted", notApplied, false, true, 0, true},
	{"applied, booted", notHeard, false, true, 0, false},
	{"booted a window later", notApplied, false, true, 30 * time.Second, true},
	{"booted past the deadline", notApplied, false, true, time.Hour, true},
	{"booted with the clock back", notApplied, false, true, -time.Hour, true},
}

// TestEveryBoundary meets every boundary of every scenario in every way. Whatever it was, afterwards the
// invariants hold, what was accepted has ended, and a deployment is promoted.
func TestEveryBoundary(t *testing.T) {
	const golden = "testdata/boundaries.golden"
	all := map[string][]string{}
	var text strings.Builder
	for i, sc := range scenarios {
		all[sc.name] = boundariesOf(t, i)
		for _, name := range slices.Sorted(slices.Values(all[sc.name])) {
			fmt.Fprintf(&text, "%s: %s\n", sc.name, name)
		}
	}
	if *update {
		must(t, os.WriteFile(golden, []byte(text.String()), 0o644))
	}
	b, err := os.ReadFile(golden)
	must(t, err)
	known, now := map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(string(b)) {
		known[strings.TrimSpace(line)] = true
	}
	for line := range strings.Lines(text.String()) {
		now[strings.TrimSpace(line)] = true
	}
	for _, line := range slices.Sorted(maps.Keys(now)) {
		if !known[line] {
			t.Errorf("a boundary that is not listed: %s", line)
		}
	}
	for _, line := range slices.Sorted(maps.Keys(known)) {
		if !now[line] {
			t.Errorf("a boundary that is gone: %s", line)
		}
	}
	if t.Failed() {
		t.Fatal("consider each, then run with -update")
	}
	for i, sc := range scenarios {
		for n, name := range all[sc.name] {
			for v, variant := range variants {
				// Day by day the sample comes around to each.
				if pick := n*len(variants) + v + 7*i + time.Now().YearDay(); *everyBoundary {
				} else if testing.Short() && (v > 0 || (n+i+time.Now().YearDay())%31 != 0) || !testing.Short() && pick%23 != 0 {
					continue
				}
				f := explore(t, func(w *world) { w.meet(i, v, name) })
				if len(f.list) > 0 {
					t.Errorf("%s, at %q, %s:\n  %s\n  --- log\n  %s", sc.name, name, variant.name, strings.Join(f.list, "\n  "),
						strings.Join(f.log[max(0, len(f.log)-40):], "\n  "))
				}
			}
		}
	}
}

// meet plays a scenario up to a boundary, does there what the variant says, and brings Toad back.
func (w *world) meet(scenario, v int, name string) {
	sc, variant := scenarios[scenario], variants[v]
	if sc.before != nil {
		sc.before(w)
	}
	same := func(n string) bool { return n == name }
	w.arm(1, variant.meet, same)
	w.play(sc.begin, sc.during)
	if variant.again && errors.Is(w.alive(), errDead) {
		w.down()
		w.arm(1, variant.meet, same)
		w.raise()
		w.play(func(*world) {}, nil)
	}
	if variant.reboot {
		w.down()
		w.h.reboot()
		w.set(func() {
			w.h.wallOffset += variant.clock
			if variant.another {
				w.h.kernelBoot += "+"
			}
		})
	}
	w.settled()
}
