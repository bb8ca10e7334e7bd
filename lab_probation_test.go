package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"
)

// brisk enrolls with the shortest times that leave room for a slow machine.
func brisk(s *labService) {
	s.en.StopDeadline = duration(15 * time.Second)
	s.en.Probation.StabilityWindow = duration(2 * time.Second)
	s.en.Probation.StartupDeadline = duration(30 * time.Second)
	s.en.Probation.RolloutDeadline = duration(time.Minute)
	s.template("StopTimeout=2", "StopTimeout=1", "TimeoutStopSec=4", "TimeoutStopSec=2")
}

// template replaces pieces of the template, which must be there.
func (s *labService) template(oldnew ...string) {
	s.t.Helper()
	for i := 0; i < len(oldnew); i += 2 {
		if !strings.Contains(s.tmpl, oldnew[i]) {
			s.t.Fatalf("the template has no %q:\n%s", oldnew[i], s.tmpl)
		}
		s.tmpl = strings.ReplaceAll(s.tmpl, oldnew[i], oldnew[i+1])
	}
}

// inContainer and inService add lines to the template.
func (s *labService) inContainer(lines ...string) {
	s.template("[Container]\n", "[Container]\n"+strings.Join(lines, "\n")+"\n")
}
func (s *labService) inService(lines ...string) {
	s.template("[Service]\n", "[Service]\n"+strings.Join(lines, "\n")+"\n")
}

// said waits until the operation's log has the text.
func (s *labService) said(id, text string) {
	s.t.Helper()
	if !s.within(60*time.Second, func() bool { return strings.Contains(s.log(id), text) }) {
		s.t.Fatalf("the log never says %q:\n%s", text, s.log(id))
	}
}

// within looks until something is so, and tells whether it came to be.
func (l *lab) within(d time.Duration, ok func() bool) bool {
	for end := time.Now().Add(d); !ok(); time.Sleep(100 * time.Millisecond) { // the host tells nobody: it has to be looked at
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

// address is the container's on the network of the workloads.
func (s *labService) address() (a string) {
	s.t.Helper()
	s.eventually("the container has an address", func() bool {
		out, status := s.try("podman", "inspect", "-f", "{{.NetworkSettings.Networks.apps.IPAddress}}", s.name)
		a = strings.TrimSpace(out)
		return status == 0 && a != ""
	})
	return a
}

func (s *labService) requestRollback(id string) {
	s.t.Helper()
	var op wireOperation
	if p := s.mustCall(s.t, "POST", "/v1/operations/"+id+"/rollback", nil, &op); p != nil {
		s.t.Fatalf("asking for a rollback of %s: %+v", id, p)
	}
}

// operation reads one as it is now.
func (s *labService) operation(id string) wireOperation {
	s.t.Helper()
	var op wireOperation
	if p := s.mustCall(s.t, "GET", "/v1/operations/"+id, nil, &op); p != nil {
		s.t.Fatalf("reading operation %s: %+v", id, p)
	}
	return op
}

// An answer that is not the instance's own, or no answer, is no evidence; each says why, and a deadline
// says which and how long it is. R2, R5, R11.
func TestLabWhatIsNoEvidence(t *testing.T) {
	l := theLab(t)
	for _, tt := range []struct {
		name, env    string
		change       func(s *labService)
		cause, wants string
		summary      string
	}{
		{"age", "STALE=1", nil, "startup_deadline", "not ready: the answer came from a cache or proxy (Age)", "9s"},
		{"via", "VIA=1", nil, "startup_deadline", "not ready: the answer came from a cache or proxy (Via)", "9s"},
		{"xcache", "XCACHE=1", nil, "startup_deadline", "not ready: the answer came from a cache or proxy (X-Cache)", "9s"},
		// It leads to a path that answers 200.
		{"redirect", "REDIRECT=/", nil, "startup_deadline", "not ready: the answer is a redirect (302), which is not followed", "9s"},
		{"otherport", "PORT=9090", nil, "startup_deadline", "not ready: nothing accepts connections at ADDRESS:8080", "ADDRESS:8080"}, // R11
		{"slow", "SLOW=30s", nil, "startup_deadline", "not ready: no answer within 1s at ADDRESS:8080", "9s"},
		{"late", "READY_AFTER=20s", nil, "startup_deadline", "not ready: status 503 at ADDRESS:8080", "startup deadline of 9s"}, // R5
		{"never", "NEVER_READY=1", func(s *labService) { s.en.Probation.StartupDeadline = 0 }, "rollout_deadline",
			"not ready: status 503 at ADDRESS:8080", "rollout deadline of 18s"}, // R2
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := l.enroll(t, "ev-"+tt.name, func(s *labService) {
				brisk(s)
				s.en.Probation.StartupDeadline = duration(9 * time.Second)
				s.en.Probation.RolloutDeadline = duration(18 * time.Second)
				if tt.change != nil {
					tt.change(s)
				}
			})
			op := s.submit(s.image("VERSION=1", tt.env))
			address := ""
			op = s.await(op.ID, func(op wireOperation) bool { return op.State == "probation" })
			if op.State == "probation" {
				address = s.address()
				if n := s.unitNumber("NRestarts"); n != 0 {
					t.Errorf("systemd restarted it %d times", n)
				}
			}
			op = s.await(op.ID, nil)
			s.expect(op, "failed", "no_rollback_target")
			if op.Failure.Cause != tt.cause || op.ReadyForSeconds != 0 || op.Restarts != 0 {
				t.Errorf("cause %s, ready for %v s, %d restarts", op.Failure.Cause, op.ReadyForSeconds, op.Restarts)
			}
			log := s.log(op.ID)
			if want := strings.ReplaceAll(tt.wants, "ADDRESS", address); !strings.Contains(log, want) {
				t.Errorf("the log does not say %q:\n%s", want, log)
			}
			if want := strings.ReplaceAll(tt.summary, "ADDRESS", address); !strings.Contains(op.Failure.Summary, want) {
				t.Errorf("the failure does not say %q: %s", want, op.Failure.Summary)
			}
			s.expectRuns() // S7
			if s.unitFile() != "" {
				t.Error("the unit of the failed candidate is still there")
			}
		})
	}
}

// Somebody else answers 200 while the candidate is in probation: a container under its name (R10), the
// old revision under its unit, the right image under other labels. None counts.
func TestLabAnswersOfOthers(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "impostor", func(s *labService) {
		s.en.Probation = probation{RolloutDeadline: duration(4 * time.Minute), StabilityWindow: duration(2 * time.Second), RestartBudget: 20}
	})
	old, next := s.image("VERSION=1"), s.image("VERSION=2")
	s.promote(old)
	s.en.Probation.StabilityWindow = duration(2 * time.Minute)
	s.apply()
	id := s.submit(next).ID
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
	t.Cleanup(func() { s.try("podman", "rm", "-f", "-t0", "-i", "impostor-other", "impostor-real") })

	s.exec(t, "podman run -q -d --name impostor-other --network apps "+old)
	s.exec(t, "podman rename impostor impostor-real && podman rename impostor-other impostor")
	s.said(id, "the container of that name is not run by the unit")
	if op := s.operation(id); op.ReadyForSeconds != 0 || op.Terminal {
		t.Errorf("an impostor's answers count: %s, ready for %v s", op.State, op.ReadyForSeconds)
	}
	s.exec(t, "podman rename impostor impostor-other && podman rename impostor-real impostor && podman rm -f -t0 impostor-other")
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })

	unit := ".config/containers/systemd/impostor/impostor.container"
	s.exec(t, "cp "+unit+" /tmp/impostor.candidate")
	for _, tt := range []struct{ change, want string }{
		{"s|^Image=.*|Image=" + old + "|", "the container runs another image reference"},
		{"s|toad.operation=.*|toad.operation=00000000000000000000000000|", "the container does not carry the labels of this revision"},
	} {
		before := s.operation(id).Restarts
		s.exec(t, fmt.Sprintf("sed '%s' /tmp/impostor.candidate > %s && systemctl --user daemon-reload && systemctl --user restart impostor.service", tt.change, unit))
		s.said(id, tt.want)
		if op := s.operation(id); op.ReadyForSeconds != 0 || op.Restarts <= before {
			t.Errorf("%s: ready for %v s, %d restarts after %d", tt.want, op.ReadyForSeconds, op.Restarts, before)
		}
	}
	s.exec(t, "cp /tmp/impostor.candidate "+unit+" && systemctl --user daemon-reload && systemctl --user restart impostor.service")
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
	s.requestRollback(id)
	s.expect(s.await(id, nil), "rolled_back", "requested")
	s.expectRuns(old)
}

// A container that is replaced again and again while it is ready is never promoted: no window spans two
// instances. R1, R6.
func TestLabCrashesAfterReady(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "crashes", brisk, func(s *labService) {
		s.en.Probation.StabilityWindow = duration(4 * time.Second)
	})
	good := s.image("VERSION=1")
	s.promote(good)
	op := s.deploy(s.image("VERSION=2", "EXIT_AFTER=2s"))
	s.expect(op, "rolled_back", "restart_budget")
	if want := "restarted 2 times, the budget is 1"; op.Restarts != 2 || !strings.Contains(op.Failure.Summary, want) {
		t.Errorf("%d restarts, %s", op.Restarts, op.Failure.Summary)
	}
	if log := s.log(op.ID); !strings.Contains(log, "seen ready") || !strings.Contains(log, "the stability window begins again") {
		t.Errorf("log:\n%s", log)
	}
	s.expectRuns(good)
}

// systemctl --user restart by hand is a restart, though systemd's own counter says 0 after it.
func TestLabRestartByHandCounts(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "by-hand", func(s *labService) {
		s.en.Probation.StabilityWindow = duration(20 * time.Second)
		s.en.Probation.RolloutDeadline = duration(2 * time.Minute)
	})
	id := s.submit(s.image("VERSION=1")).ID
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
	s.exec(t, "systemctl --user restart by-hand.service")
	op := s.await(id, func(op wireOperation) bool { return op.Restarts == 1 && op.ReadyForSeconds > 0 })
	if op.Terminal || s.unitNumber("NRestarts") != 0 {
		t.Fatalf("after one restart by hand: %s, %+v", op.State, op.Failure)
	}
	s.exec(t, "systemctl --user restart by-hand.service || true") // it may be stopped meanwhile
	op = s.await(id, nil)
	s.expect(op, "failed", "no_rollback_target")
	if op.Failure.Cause != "restart_budget" || op.Restarts != 2 {
		t.Errorf("cause %s, %d restarts", op.Failure.Cause, op.Restarts)
	}
}

// A health check slower than the start's timeout: systemd gives the start up. R7.
func TestLabNotifyHealthy(t *testing.T) {
	l := theLab(t)
	for _, tt := range []struct{ name, restart, cause, wants string }{
		{"once", "Restart=no", "start_failed", "result timeout"},
		{"again", "Restart=always", "restart_budget", "restarted 2 times"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := l.enroll(t, "notify-"+tt.name, func(s *labService) {
				brisk(s)
				s.en.Probation.StartupDeadline = duration(55 * time.Second)
				s.en.Probation.RolloutDeadline = duration(60 * time.Second)
				s.inContainer("Notify=healthy", `HealthCmd=["/tapp","wait","30s"]`, "HealthInterval=1s", "HealthTimeout=40s")
				s.inService("TimeoutStartSec=3")
				s.template("Restart=always", tt.restart)
			})
			op := s.deploy(s.image("VERSION=1"))
			s.expect(op, "failed", "no_rollback_target")
			if op.Failure.Cause != tt.cause || !strings.Contains(op.Failure.Summary, tt.wants) {
				t.Errorf("cause %s: %s", op.Failure.Cause, op.Failure.Summary)
			}
			s.expectRuns()
		})
	}
}

// Podman's own health status is not Toad's evidence. R8.
func TestLabHealthStaysStarting(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "starting", brisk, func(s *labService) {
		s.inContainer(`HealthCmd=["/tapp","wait","1h"]`, "HealthInterval=1h", "HealthStartPeriod=1h")
	})
	image := s.image("VERSION=1")
	s.promote(image)
	if got := s.exec(t, "podman inspect -f '{{.State.Health.Status}}' starting"); got != "starting" {
		t.Errorf("Podman says %s: this shows nothing", got)
	}
	s.expectRuns(image)
}

// A crash loop as fast as Podman lets it, with Toad killed in the middle of it three times: the count
// that ends probation is systemd's, and it ends within one interval of the restart that exhausts the
// budget.
func TestLabCrashLoop(t *testing.T) {
	const budget = 30
	s := theLab(t).enroll(t, "loop", brisk, func(s *labService) {
		s.en.Probation.RestartBudget = budget
		s.en.Probation.StartupDeadline = duration(4 * time.Minute)
		s.en.Probation.RolloutDeadline = duration(5 * time.Minute)
		s.en.Readiness.Interval = duration(500 * time.Millisecond)
		s.inService("RestartSec=0")
		s.tmpl = "[Unit]\nStartLimitIntervalSec=0\n\n" + s.tmpl
	})
	good := s.image("VERSION=1")
	s.promote(good)
	since := s.exec(t, "date +%s")
	begun := time.Now()
	id := s.submit(s.image("VERSION=2", "CRASH=1")).ID
	for _, at := range []int{5, 12, 20} {
		s.await(id, func(op wireOperation) bool { return op.Restarts >= at })
		s.killToad(t)
	}
	op := s.await(id, nil)
	s.expect(op, "rolled_back", "restart_budget")

	// What systemd itself wrote of each restart that it scheduled.
	var exhausted time.Time
	last := 0
	for line := range strings.Lines(s.exec(t, "journalctl --user -u loop.service -o json --since @"+since)) {
		var e struct {
			ID string `json:"MESSAGE_ID"`
			N  string `json:"N_RESTARTS"`
			At string `json:"__REALTIME_TIMESTAMP"`
		}
		if json.Unmarshal([]byte(line), &e) != nil || e.N == "" {
			continue
		}
		n, _ := strconv.Atoi(e.N)
		us, _ := strconv.ParseInt(e.At, 10, 64)
		if last = max(last, n); n == budget+1 {
			exhausted = time.UnixMicro(us)
		}
	}
	if exhausted.IsZero() {
		t.Fatalf("systemd restarted it %d times only, Toad counted %d", last, op.Restarts)
	}
	if op.Restarts != budget+1 {
		t.Errorf("Toad counted %d restarts when it ended probation, systemd had %d, the budget is %d", op.Restarts, last, budget)
	}
	for _, x := range op.Timeline {
		if x.State != "rolling_back" {
			continue
		}
		late := time.Time(x.At).Sub(exhausted)
		t.Logf("%d restarts in %s; probation ended %s after the last of them", op.Restarts, time.Since(begun).Round(time.Second), late.Round(time.Millisecond))
		if late > time.Duration(s.en.Readiness.Interval) || late < -50*time.Millisecond {
			t.Errorf("probation ended %s after the restart that exhausted the budget, the interval is %s", late, s.en.Readiness.Interval)
		}
	}
	s.expectRuns(good)
}

// Signals are lost: the bus is restarted under Toad, and the container crashes meanwhile. What is there
// is found by looking, and no restart is missed. R9.
func TestLabSignalsLost(t *testing.T) {
	s := theLab(t).enroll(t, "lost", func(s *labService) {
		s.en.Probation.StabilityWindow = duration(8 * time.Second)
		s.en.Probation.RolloutDeadline = duration(2 * time.Minute)
		s.en.Probation.StartupDeadline = duration(time.Minute)
		s.en.Probation.RestartBudget = 3
	})
	image := s.image("VERSION=1")
	id := s.submit(image).ID
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
	for range 2 {
		s.exec(t, "systemctl --user restart dbus.service; podman kill --signal KILL lost")
		n := s.operation(id).Restarts
		s.await(id, func(op wireOperation) bool { return op.Restarts > n && op.ReadyForSeconds > 0 })
	}
	op := s.await(id, nil)
	s.expect(op, "promoted", "")
	if n := s.unitNumber("NRestarts"); op.Restarts != 2 || n != 2 {
		t.Errorf("Toad counted %d restarts, systemd %d", op.Restarts, n)
	}
	s.expectRuns(image)
}

// The container is replaced while it is being asked: by a restart, which systemd signals in the middle of
// the answer, and behind systemd's back. Neither answer counts, each says why, and the window begins again.
func TestLabReplacedWhileAsked(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "between", func(s *labService) {
		s.en.Probation = probation{RolloutDeadline: duration(4 * time.Minute), StabilityWindow: duration(2 * time.Minute), RestartBudget: 20}
		s.en.Readiness.Timeout = duration(6 * time.Second)
	})
	t.Cleanup(func() { s.try("podman", "rm", "-f", "-t0", "-i", "between-other", "between-real") })
	image := s.image("VERSION=1", "SLOW=4s", "IGNORE_TERM=1") // it is asked all the time, and goes on answering when it is to stop
	id := s.submit(image).ID
	for range 2 {
		s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
		said, before := len(s.log(id)), s.operation(id).Restarts
		s.exec(t, "systemctl --user restart between.service")
		const want = "the stability window begins again after "
		if !s.within(20*time.Second, func() bool {
			log := s.log(id)[said:]
			return strings.Contains(log, want) && strings.Contains(log, changedWhileAsked)
		}) {
			t.Fatalf("the log does not say %q and %q:\n%s", want, changedWhileAsked, s.log(id)[said:])
		}
		if op := s.operation(id); op.ReadyForSeconds != 0 || op.Restarts <= before {
			t.Errorf("ready for %v s, %d restarts after %d", op.ReadyForSeconds, op.Restarts, before)
		}
	}

	// Which look meets the other container is chance: it is put there until one does after an answer.
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
	const want = "it changed while it answered: the container of that name is not run by the unit"
	s.exec(t, "podman run -q -d --name between-other --network apps "+image)
	met := s.within(90*time.Second, func() bool {
		s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
		said := len(s.log(id))
		s.exec(t, "podman rename between between-real && podman rename between-other between")
		if !s.within(20*time.Second, func() bool { return strings.Contains(s.log(id)[said:], "is not run by the unit") }) {
			t.Fatalf("another container under its name counts:\n%s", s.log(id))
		}
		s.exec(t, "podman rename between between-other && podman rename between-real between")
		return strings.Contains(s.log(id)[said:], want)
	})
	if !met {
		t.Errorf("the log never says %q:\n%s", want, s.log(id))
	}
	s.requestRollback(id)
	s.expect(s.await(id, nil), "failed", "no_rollback_target")
}

// The old instance, started again outside its unit, takes the candidate's address on the enrolled network
// and answers 200 there: it is not asked.
func TestLabOldInstanceOnTheAddress(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "address", func(s *labService) {
		s.en.Probation = probation{RolloutDeadline: duration(3 * time.Minute), StabilityWindow: duration(2 * time.Second), RestartBudget: 1}
	})
	old, next := s.image("VERSION=1"), s.image("VERSION=2")
	promotion := s.promote(old)
	s.en.Probation.StabilityWindow = duration(time.Minute)
	s.apply()
	id := s.submit(next).ID
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
	t.Cleanup(func() { s.try("podman", "rm", "-f", "-t0", "-i", "address-old") })

	at := s.address()
	s.exec(t, fmt.Sprintf("podman network disconnect apps address && podman run -q -d --name address-old --label toad.operation=%s --network apps --ip %s %s", promotion.ID, at, old))
	s.eventually("the old image answers on the address", func() bool {
		out, _ := s.try("podman", "unshare", "--rootless-netns", "curl", "-sS", "-m2", "http://"+at+":8080/ready")
		return out == "ok 1"
	})
	s.said(id, "the container has no address on the enrolled network")
	if op := s.operation(id); op.ReadyForSeconds != 0 || op.Terminal {
		t.Errorf("the old instance's answers count: %s, ready for %v s", op.State, op.ReadyForSeconds)
	}
	s.exec(t, "podman rm -f -t0 address-old && podman network connect --ip "+at+" apps address")
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })
	if op := s.operation(id); op.Restarts != 0 {
		t.Errorf("%d restarts", op.Restarts)
	}
	s.requestRollback(id)
	s.expect(s.await(id, nil), "rolled_back", "requested")
	s.expectRuns(old)
}

// The same image under two digests: one is stored beside the other, Podman's ImageDigest names whichever
// came last, and each deployment is told from the other by its own reference. G5.
func TestLabSameImageUnderTwoDigests(t *testing.T) {
	t.Parallel()
	s := theLab(t).enroll(t, "twin", brisk)
	one := s.image("VERSION=1")
	s.promote(one)
	two := s.en.Repository + "@sha256:" + s.exec(t, fmt.Sprintf(`type=application/vnd.oci.image.manifest.v1+json at=http://registry.lab:5000/v2/apps/twin/manifests
curl -fsS -H "Accept: $type" $at/%s | jq -j '.annotations.twin = "again"' > /tmp/twin && curl -fsS -X PUT -H "Content-Type: $type" --data-binary @/tmp/twin $at/again && sha256sum /tmp/twin | cut -d' ' -f1`, digestOf(one)))
	s.promote(two)
	s.expectRuns(two)
	ids := strings.Fields(s.exec(t, fmt.Sprintf("podman image inspect -f '{{.Id}} {{.Digest}}' %s %s", one, two)))
	if ids[0] != ids[2] {
		t.Fatalf("two images, %v: this shows nothing", ids)
	}
	t.Logf("image id and digest by each reference: %v", ids)
	s.promote(one)
	s.expectRuns(one)
	s.expect(s.rollback(), "promoted", "")
	s.expectRuns(two)
}

// Another image is put under the candidate's reference in Podman, and the candidate restarted: what runs
// then has the reference and the labels, and is not the verified image. Podman itself refuses to do this
// (no tag has a digest, and a load is compared with it), so its storage is edited.
func TestLabAnotherImageUnderTheReference(t *testing.T) {
	s := theLab(t).enroll(t, "swapped", func(s *labService) {
		s.en.Probation = probation{RolloutDeadline: duration(3 * time.Minute), StabilityWindow: duration(2 * time.Second), RestartBudget: 5}
	})
	old, next := s.image("VERSION=1"), s.image("VERSION=2")
	s.promote(old)
	s.en.Probation.StabilityWindow = duration(time.Minute)
	s.apply()
	id := s.submit(next).ID
	s.await(id, func(op wireOperation) bool { return op.ReadyForSeconds > 0 })

	var archive bytes.Buffer
	must(t, writeArchive(&archive, s.path("/home/toad/.local/share/toad/services/swapped/images"), next, digestOf(old)))
	load := s.lab.lab("exec", "podman", "load")
	load.Stdin = &archive
	if out, err := load.CombinedOutput(); err == nil || !strings.Contains(string(out), "would not match") {
		t.Errorf("Podman loads another image under the reference: %v: %s", err, out)
	}
	s.exec(t, fmt.Sprintf(`cd .local/share/containers/storage/overlay-images && other=$(podman image inspect -f '{{.Id}}' %[1]s) &&
jq --arg ref %[2]s --arg other $other 'map(.names = ((.names // []) - [$ref] + if .id == $other then [$ref] else [] end))' images.json > images.json.new && mv images.json.new images.json &&
systemctl --user restart swapped.service`, old, next))
	t.Logf("runs now: %s", s.exec(t, "podman ps --no-trunc --filter label=toad.service=swapped --format '{{.Image}} {{.ImageID}}'"))
	s.said(id, "the container runs another image than the verified one")
	if op := s.operation(id); op.ReadyForSeconds != 0 || op.Restarts != 1 || op.Terminal {
		t.Errorf("%s, ready for %v s, %d restarts", op.State, op.ReadyForSeconds, op.Restarts)
	}
	s.requestRollback(id)
	s.expect(s.await(id, nil), "rolled_back", "requested")
	s.expectRuns(old)
}
