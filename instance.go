// instance.go is what is done to the host for one instance, each step looking before and after: whose
// the unit is, the image in Podman, the unit's file, the proof of termination. It decides no state.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// stillThere is the private half of termination_unconfirmed: what remains, in public words.
type stillThere []string

func (r stillThere) Error() string { return strings.Join(r, "; ") }

func remainsOf(err error) []string {
	var r stillThere
	errors.As(err, &r)
	return r
}

// owns sees that the unit's name and file are this service's own or nobody's. Every write to the Quadlet
// directory comes after it: nothing else of that directory is ever Toad's to write, so a directory of the
// service that leads elsewhere, to infrastructure's units perhaps, is refused.
func (s *service) owns(ctx context.Context, rev *revision) error {
	unit := rev.Enrollment.Unit
	if !serviceID.MatchString(s.name) || !unitRE.MatchString(unit) {
		return failed("unit_not_owned", nil, unit)
	}
	if st, err := os.Lstat(filepath.Dir(s.unitPath(unit))); err == nil && !st.IsDir() {
		return failed("unit_not_owned", fmt.Errorf("%s is no directory", filepath.Dir(s.unitPath(unit))), unit)
	}
	if b, err := os.ReadFile(s.unitPath(unit)); err == nil {
		if m, ok := parseMarker(b); !ok || !s.wrote(m) {
			return failed("unit_not_owned", nil, unit)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("reading the unit file: %w", err)
	}
	st, err := s.host.units.Unit(ctx, serviceName(unit))
	if err != nil {
		return err
	}
	if st.LoadState != "not-found" && !s.ours(st, unit) {
		return failed("unit_not_owned", nil, unit)
	}
	return nil
}

// ours tells that the loaded unit comes from this service's file. SourcePath is a path of the host, of
// which Toad knows the end.
func (s *service) ours(st unitStatus, unit string) bool {
	return strings.HasSuffix(st.SourcePath, "/"+s.name+"/"+unit)
}

// wrote tells that a marker names a revision that this service's records know, be its own damaged.
func (s *service) wrote(m unitIdentity) bool {
	if m.DataID != s.data.id || m.Service != s.name {
		return false
	}
	if rev, err := s.data.revision(s.name, m.Generation); err == nil {
		return rev.Operation == m.Operation
	}
	if !operationID.MatchString(m.Operation) {
		return false
	}
	op := s.op()
	if op == nil || op.ID != m.Operation {
		var err error
		if op, err = s.data.operation(s.name, m.Operation); err != nil {
			return false
		}
	}
	return op.Candidate.Generation == m.Generation
}

// foreign sees that no container has the service's name or labels but the one that its unit runs. The
// unit is looked at before and after the list: what both agree on is what the list was made of.
func (s *service) foreign(ctx context.Context, rev *revision) error {
	unit := serviceName(rev.Enrollment.Unit)
	before, err := s.host.units.Unit(ctx, unit)
	if err != nil {
		return err
	}
	for try := 1; ; try++ {
		list, err := s.host.containers.Containers(ctx, s.name, unit, rev.Container)
		if err != nil {
			return err
		}
		after, err := s.host.units.Unit(ctx, unit)
		if err != nil {
			return err
		}
		same := before.InvocationID == after.InvocationID && before.MainPID == after.MainPID && before.Job == after.Job &&
			before.ActiveState == after.ActiveState
		between := !same || after.Job != 0 || after.ActiveState == "activating" || after.ActiveState == "deactivating"
		again := false
		for _, c := range list {
			switch {
			case c.Unit == unit && c.ConmonPID != 0 && c.ConmonPID == after.MainPID, slices.Contains(s.rec.Load().Containers, c.ID), s.leftBehind(unit, c):
			case c.Unit == unit && between:
				again = again || !same // its own, of a start before or after; whoever is still there after the stop is seen then
			default:
				return failed("foreign_container", nil, c.Name, shortID(c.ID))
			}
		}
		if !again || try == 3 {
			return nil
		}
		before = after
	}
}

func shortID(id string) string { return id[:min(12, len(id))] }

// alone sees that nothing else starts or stops with the unit but what its own [Install] names.
func (s *service) alone(ctx context.Context, rev *revision) error {
	st, err := s.host.units.Unit(ctx, serviceName(rev.Enrollment.Unit))
	if err != nil {
		return err
	}
	own := installTargets(rev.unit)
	if b, err := os.ReadFile(s.unitPath(rev.Enrollment.Unit)); err == nil {
		own = append(own, installTargets(b)...)
	}
	var others []string
	for _, d := range st.Dependents {
		if !slices.Contains(own, d) {
			others = append(others, d)
		}
	}
	if len(others) > 0 {
		return failed("unit_invalid", nil, "other units start or stop with it: "+strings.Join(others, ", "))
	}
	return nil
}

// loadTime bounds one load of an image where no deadline does.
const loadTime = 10 * time.Minute

// ensureImage sees that Podman has the image under its reference and that it is the verified one, and
// loads it from the layout if it is not there. It tells whether it had to. Only a load that was refused
// or broke, again and again, has failed: a Podman that does not answer has said nothing, and can be asked
// again.
func (s *service) ensureImage(ctx context.Context, ref reference) (loaded bool, err error) {
	for range 3 {
		var id string
		id, err = s.host.containers.Image(ctx, ref.Image)
		switch {
		case err == nil && id == ref.ConfigID:
			return loaded, nil
		case err == nil:
			return loaded, failed("digest_mismatch", fmt.Errorf("podman has image id %s, the manifest names %s", id, ref.ConfigID), ref.Image)
		case !errors.Is(err, errNotFound):
			return loaded, fmt.Errorf("looking for the image: %w", err)
		}
		s.say("loading")
		lctx, cancel := context.WithTimeout(ctx, loadTime)
		err = s.load(lctx, ref)
		deaf := lctx.Err() != nil
		cancel()
		if errors.Is(err, errUnreachable) || err != nil && deaf {
			return loaded, fmt.Errorf("loading the image: %w", err)
		}
		loaded = loaded || err == nil
	}
	return loaded, failed("load_failed", err)
}

// imageForStart loads the image of a unit that is starting if somebody took it from Podman since: its
// next try then finds it.
func (s *service) imageForStart(ctx context.Context, d *deadline, st unitStatus, ref reference) {
	if st.ActiveState != "activating" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.left(d))
	defer cancel()
	if loaded, err := s.ensureImage(ctx, ref); err != nil {
		s.log.Warn("loading the image for a start", "err", err)
	} else if loaded {
		s.say("image_missing_again")
	}
}

// load streams the image from the layout into Podman, once.
func (s *service) load(ctx context.Context, ref reference) error {
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := writeArchive(w, s.images(), ref.Image, ref.digest())
		w.CloseWithError(err)
		done <- err
	}()
	err := s.host.containers.Load(ctx, r)
	r.CloseWithError(errors.New("podman stopped reading"))
	if werr := <-done; err == nil || errors.Is(werr, errDamaged) || errors.Is(werr, errNotFound) {
		err = errors.Join(err, werr)
	}
	return err
}

// verifyUnit proves on the host, before anything stops, that its own generator, systemd and Podman take
// the candidate's unit: the generator runs dry over a copy in the data directory, systemd-analyze over
// what it printed, and podman reads the flags of the command in it without running it. The generator is
// judged by whether it printed this unit's service, not by its exit status, which any other file's fault
// sets. What they say goes to the local log only.
//
// Podman is not made to create the container: that would make volumes, want networks and directories
// that only the unit's start makes, and refuse units that work. What it would find beyond flags is for
// the enrollment's own rules.
func (s *service) verifyUnit(ctx context.Context, rev *revision) error {
	hostData, hostQuadlets, err := s.host.hostPaths(ctx)
	if err != nil {
		return fmt.Errorf("finding the host's paths: %w", err)
	}
	form := candidateForm(rev.unit)
	if err := checkUnitText(form); err != nil {
		return failed("unit_invalid", err, "it does not parse")
	}
	if name := s.spoilt(rev.Enrollment.Unit); name != "" {
		return failed("unit_invalid", nil, name+" beside it cannot be loaded, and takes it along")
	}
	dir, hostDir := filepath.Join(s.data.path, "check", s.name), filepath.Join(hostData, "check", s.name)
	if err := makeDir(dir); err != nil {
		return err
	}
	unit, svc := rev.Enrollment.Unit, serviceName(rev.Enrollment.Unit)
	if err := writeFile(filepath.Join(dir, unit), form); err != nil {
		return err
	}
	job := "toad-check-" + s.name + ".service"
	out := filepath.Join(hostDir, "out")
	if _, err := s.host.units.Run(ctx, job,
		[]string{"/usr/lib/systemd/user-generators/podman-user-generator", "--user", "--dryrun"},
		[]string{"QUADLET_UNIT_DIRS=" + hostDir + ":" + hostQuadlets}, out); err != nil {
		return fmt.Errorf("running the generator: %w", err)
	}
	said, err := os.ReadFile(filepath.Join(dir, "out"))
	if err != nil {
		return fmt.Errorf("reading what the generator said: %w", err)
	}
	text, ok := generated(string(said), svc)
	if !ok || !strings.Contains(text, "SourcePath="+filepath.Join(hostDir, unit)+"\n") {
		s.log.Error("the generator refuses the unit", "unit", unit, "said", string(said))
		return failed("unit_invalid", nil, "Podman's generator makes no unit of it")
	}
	if err := writeFile(filepath.Join(dir, svc), []byte(text)); err != nil {
		return err
	}
	ok, err = s.host.units.Run(ctx, job,
		[]string{"/usr/bin/systemd-analyze", "--user", "verify", "--man=no", "--recursive-errors=no", filepath.Join(hostDir, svc)}, nil, out)
	if err != nil {
		return fmt.Errorf("running systemd-analyze: %w", err)
	}
	if !ok {
		said, _ := os.ReadFile(filepath.Join(dir, "out"))
		s.log.Error("systemd refuses the unit", "unit", unit, "said", string(said))
		return failed("unit_invalid", nil, "systemd does not accept it")
	}
	help := helpCommand(text)
	if help == nil {
		s.log.Error("the generated unit has no podman run", "unit", unit, "text", text)
		return failed("unit_invalid", nil, "Podman's generator makes no container of it")
	}
	if ok, err = s.host.units.Run(ctx, job, help, nil, out); err != nil {
		return fmt.Errorf("running podman: %w", err)
	}
	if !ok {
		said, _ := os.ReadFile(filepath.Join(dir, "out"))
		s.log.Error("podman refuses the command", "unit", unit, "said", string(said))
		return failed("unit_invalid", nil, "Podman does not accept its flags")
	}
	return nil
}

// spoilt names a file in the unit's own directory that the generator cannot load: with it, the generator
// drops every unit of that directory. The dry run cannot tell, because it reads a copy elsewhere.
func (s *service) spoilt(unit string) string {
	dir := filepath.Dir(s.unitPath(unit))
	files, err := os.ReadDir(dir)
	if err != nil {
		return "" // there is none yet
	}
	for _, f := range files {
		switch filepath.Ext(f.Name()) {
		case ".container", ".volume", ".network", ".kube", ".image", ".build", ".pod":
		default:
			continue
		}
		if f.Name() == unit {
			continue // it is written anew
		}
		text, err := readBounded(filepath.Join(dir, f.Name()))
		if err == nil {
			_, err = scanUnit(text)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.log.Error("a file in the unit's directory cannot be loaded", "file", f.Name(), "err", err)
			return f.Name()
		}
	}
	return ""
}

// helpCommand is the podman command of a generated unit, which reads all its flags and then only prints
// its help; nil if there is none.
func helpCommand(text string) []string {
	u, err := scanUnit([]byte(text))
	if err != nil {
		return nil
	}
	l, _ := u.lastOf("Service", "ExecStart")
	argv := words(l.value)
	i := slices.Index(argv, "run")
	if i < 1 || !filepath.IsAbs(argv[0]) {
		return nil
	}
	return slices.Insert(argv, i+1, "--help")
}

// generated cuts one unit's text out of what a dry run of the generator printed.
func generated(said, svc string) (string, bool) {
	_, text, ok := strings.Cut("\n"+said, "\n---"+svc+"---\n")
	text, _, _ = strings.Cut(text, "\n---")
	return text + "\n", ok
}

// recordContainers persists the step together with the id of what the unit runs: a record of Podman's
// may later be removed by force only if its id was recorded.
func (s *service) recordContainers(ctx context.Context, rev *revision, step string) error {
	unit := serviceName(rev.Enrollment.Unit)
	st, err := s.host.units.Unit(ctx, unit)
	if err != nil {
		return err
	}
	list, err := s.host.containers.Containers(ctx, s.name, unit, rev.Container)
	if err != nil {
		return err
	}
	return s.intend(step, func(r *record) {
		for _, c := range list {
			if c.Unit == unit && c.ConmonPID != 0 && c.ConmonPID == st.MainPID {
				r.addContainer(c.ID)
			}
		}
	})
}

// addContainer remembers the id of a container that the unit ran; the oldest are forgotten.
func (r *record) addContainer(id string) {
	if !slices.Contains(r.Containers, id) {
		r.Containers = append(r.Containers, id)
		r.Containers = r.Containers[max(0, len(r.Containers)-32):]
	}
}

// stopAndConfirm stops the unit and returns nil only when every witness says that the instance is
// gone. The job's result is none: systemd says done while an unkillable process still lives.
func (s *service) stopAndConfirm(ctx context.Context, rev *revision, dl *deadline) error {
	unit := serviceName(rev.Enrollment.Unit)
	var asked time.Time
	var said string
	remains := stillThere{"nothing could be asked yet"}
	for first := true; ; first = false {
		left := s.left(dl)
		if left <= 0 && !first {
			return failed("termination_unconfirmed", remains, time.Duration(rev.Enrollment.StopDeadline), remains.Error())
		}
		// One look is made even when the deadline passed while Toad was away: it may well be gone, and
		// Podman's service has to wake up to say so.
		atLeast := time.Second
		if first {
			atLeast = 10 * time.Second
		}
		actx, cancel := context.WithTimeout(ctx, max(left, atLeast))
		st, err := s.host.units.Unit(actx, unit)
		switch {
		case err != nil:
			s.log.Warn("looking at the unit", "err", err)
			remains = stillThere{"systemd does not answer"}
		case !st.stopped() && (asked.IsZero() || st.Job == 0 && time.Since(asked) > time.Second):
			asked = time.Now()
			if err := s.host.units.Stop(actx, unit); err != nil {
				s.log.Warn("stopping the unit", "err", err)
			}
			remains = stillThere{"the unit is " + st.ActiveState + " (" + st.SubState + ")"}
		default:
			remains = s.remains(actx, rev, st)
		}
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if len(remains) == 0 {
			return nil
		}
		if text := remains.Error(); text != said && !asked.IsZero() && time.Since(asked) > 5*time.Second {
			said = text
			s.say("still_there", text)
		}
		pause := 250 * time.Millisecond // signals come sooner
		if st.stopped() {
			pause = 20 * time.Millisecond // systemd is through, the last witness lags
			if !asked.IsZero() && time.Since(asked) > 5*time.Second {
				pause = time.Second
			}
		}
		if err := s.wait(ctx, min(pause, max(s.left(dl), time.Millisecond))); err != nil {
			return err
		}
		s.signals.take() // only a reason to look
	}
}

// remains asks every witness but systemd's word and says what is still there.
func (s *service) remains(ctx context.Context, rev *revision, st unitStatus) stillThere {
	unit := serviceName(rev.Enrollment.Unit)
	var r stillThere
	if !st.stopped() {
		r = append(r, "the unit is "+st.ActiveState+" ("+st.SubState+")")
	}
	procs, err := s.host.units.Processes(ctx, unit)
	switch {
	case err != nil:
		s.log.Warn("listing the unit's processes", "err", err)
		r = append(r, "systemd does not tell the unit's processes")
	case len(procs) > 0:
		s.log.Warn("processes of the unit are still there", "processes", procs)
		r = append(r, fmt.Sprintf("%d process(es) in the unit's control group", len(procs)))
	case st.ControlGroup != "":
		r = append(r, "the unit's control group")
	}
	gone := len(r) == 0
	list, err := s.host.containers.Containers(ctx, s.name, unit, rev.Container)
	if err != nil {
		s.log.Warn("listing containers", "err", err)
		return append(r, "Podman does not answer")
	}
	for _, c := range list {
		if gone && !slices.Contains(s.rec.Load().Containers, c.ID) && s.leftBehind(unit, c) {
			if err := s.commit(func(r *record) error { r.addContainer(c.ID); return nil }); err != nil {
				s.log.Warn("recording a container", "container", c.ID, "err", err)
			}
		}
		// A record that Podman kept of a dead container of ours is removed; nothing else ever is.
		if gone && slices.Contains(s.rec.Load().Containers, c.ID) {
			if err := s.host.containers.Remove(ctx, c.ID); err != nil {
				s.log.Warn("removing a dead container's record", "container", c.ID, "err", err)
			} else if _, err := s.host.containers.Container(ctx, c.ID); errors.Is(err, errNotFound) {
				continue
			}
		}
		r = append(r, fmt.Sprintf("container %s (%s) is %s", c.Name, shortID(c.ID), c.Status))
	}
	return r
}

// leftBehind tells that a container which does not run is what a start of our unit left: by its unit, its
// name, and the labels and the image of a revision that the records know. Podman keeps such a record when
// the host was reset, or its podman run was killed, before Toad could see its id.
func (s *service) leftBehind(unit string, c container) bool {
	g, err := strconv.ParseInt(c.Labels["toad.generation"], 10, 64)
	if err != nil || c.Unit != unit || c.Labels["toad.service"] != s.name || !slices.Contains([]string{"created", "exited", "stopped"}, c.Status) {
		return false
	}
	rev, err := s.data.revision(s.name, g)
	return err == nil && rev.Operation == c.Labels["toad.operation"] && rev.Container == c.Name && rev.Image == c.ImageName
}

// place makes the host ready to start a revision: bytes in Podman, unit written, reloaded, read back.
// Nothing runs while it does: a file written under a running unit would start at its next crash.
func (s *service) place(ctx context.Context, rev *revision, ref reference, form []byte) error {
	if err := s.intend(stepWrite, nil); err != nil {
		return err
	}
	if loaded, err := s.ensureImage(ctx, ref); err != nil {
		return err
	} else if loaded {
		s.say("image_missing_again")
	}
	return s.writeUnit(ctx, rev, form)
}

// writeUnit writes a form of the revision's unit, reloads, and proves from the loaded unit that it is
// this one: the reload says success for a broken file too.
func (s *service) writeUnit(ctx context.Context, rev *revision, form []byte) error {
	if err := checkUnitText(form); err != nil {
		return failed("unit_invalid", err, "it does not parse")
	}
	if err := s.owns(ctx, rev); err != nil {
		return err
	}
	path := s.unitPath(rev.Enrollment.Unit)
	if err := makeDir(filepath.Dir(path)); err != nil {
		return notWritten(err)
	}
	old, err := os.ReadFile(path)
	if changed := err != nil || string(old) != string(form); changed {
		if err := replaceUnit(path, form); err != nil {
			return notWritten(err)
		}
	} else if err := syncFile(path); err != nil { // found so: maybe not durable yet
		return notWritten(err)
	}
	if err := syncDir(filepath.Dir(filepath.Dir(path))); err != nil { // its directory may have been found, too
		return notWritten(err)
	}
	if err := s.host.units.Reload(ctx); err != nil {
		return fmt.Errorf("reloading: %w", err)
	}
	st, err := s.host.units.Unit(ctx, serviceName(rev.Enrollment.Unit))
	if err != nil {
		return err
	}
	if why := s.misread(st, rev); why != "" {
		if st.LoadState == "not-found" && old != nil && string(old) != string(form) {
			// What was there before can be loaded: better that than no unit at all.
			s.log.Error("the written unit is not loaded; the file before it is put back", "unit", rev.Enrollment.Unit)
			if err := replaceUnit(path, old); err != nil {
				return notWritten(err)
			}
			if err := s.host.units.Reload(ctx); err != nil {
				s.log.Warn("reloading", "err", err)
			}
		}
		return failed("unit_invalid", fmt.Errorf("unit status %+v", st), why)
	}
	s.say("unit_written", rev.Generation)
	return nil
}

// notWritten is a failure of the Quadlet directory: the host's, and no reason to doubt the records.
func notWritten(err error) error {
	return failed("interrupted", errors.New(err.Error()), "its unit could not be written or removed on the host")
}

// replaceUnit writes a unit file, readable by the generator. On a full Quadlet directory the previous
// one, kept beside it under a name that the generator ignores, can still be put back.
func replaceUnit(path string, form []byte) error {
	prev := path + ".prev"
	if b, err := os.ReadFile(prev); err == nil && string(b) == string(form) {
		// Going back: a rename needs no room. The file it replaces is a failed candidate's.
		if err := boundary("replace", path); err != nil {
			return storageError("replacing", path, err)
		}
		if err := os.Rename(prev, path); err == nil {
			return syncFile(path)
		}
	}
	if err := boundary("keep", path); err != nil {
		return storageError("keeping", path, err)
	}
	os.Remove(prev)
	if err := os.Link(path, prev); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return storageError("keeping", path, err)
	}
	return writeFileMode(path, form, 0o644)
}

// misread says why the loaded unit is not the revision's; "" if it is.
func (s *service) misread(st unitStatus, rev *revision) string {
	args := st.ExecStart
	switch {
	case st.LoadState != "loaded":
		return "after the reload it is " + st.LoadState
	case !s.ours(st, rev.Enrollment.Unit):
		return "another file provides it"
	case st.NeedDaemonReload:
		return "it changed on disk after the reload"
	case len(args) == 0 || !slices.Contains(args, rev.Image):
		return "it does not run the revision's image"
	case !slices.Contains(args, rev.Container) && !slices.Contains(args, "--name="+rev.Container):
		return "it does not run under the enrolled container name"
	}
	return ""
}

// startedSince tells whether the unit was started since then: a job is queued, its invocation is not the
// one of before, or Podman remembers a start. Its state tells nothing: the instance that was stopped
// before may have ended as failed.
func (s *service) startedSince(ctx context.Context, rev *revision, before string, since time.Time) (bool, error) {
	st, err := s.host.units.Unit(ctx, serviceName(rev.Enrollment.Unit))
	if err != nil {
		return false, err
	}
	if st.Job != 0 || st.InvocationID != "" && st.InvocationID != before {
		return true, nil
	}
	n, err := s.host.containers.Starts(ctx, rev.Container, rev.Operation, since)
	return n > 0, err
}

// runs tells that what the unit runs, or is about to, is this revision: by its file, the loaded digest,
// and the labels of the container if there is one already. An error is no answer of the host's.
func (s *service) runs(ctx context.Context, rev *revision, ref reference) (bool, error) {
	b, err := os.ReadFile(s.unitPath(rev.Enrollment.Unit))
	if err != nil || string(b) != string(rev.unit) {
		return false, nil
	}
	_, st, err := identify(ctx, s.host.units, s.host.containers, rev, ref)
	switch {
	case err == nil, errors.As(err, new(notReady)) && st.ActiveState == "activating":
		return s.misread(st, rev) == "", nil
	case errors.As(err, new(notReady)):
		return false, nil
	}
	return false, err
}

// removeUnit takes the service's unit file away and proves that the unit is gone. Whoever else's file
// stands there is left alone.
func (s *service) removeUnit(ctx context.Context, rev *revision) error {
	if err := s.owns(ctx, rev); err != nil {
		return err
	}
	path := s.unitPath(rev.Enrollment.Unit)
	for _, p := range []string{path, path + ".prev"} {
		if err := removeFile(p); err != nil {
			return notWritten(err)
		}
	}
	var err error
	for range 3 {
		if err = s.host.units.Reload(ctx); err == nil {
			return nil
		}
		if werr := s.wait(ctx, time.Second); werr != nil {
			return werr
		}
	}
	return fmt.Errorf("reloading: %w", err)
}

// How much of a candidate's own output is kept: its last lines, and of those the last bytes.
const (
	outputLines = 2000
	outputBytes = 256 << 10
)

// outputPath is where what a candidate wrote itself is kept.
func (s *service) outputPath(operation string) string {
	return s.data.serviceFile(s.name, "operations", operation+".output")
}

// keepOutput copies what the stopped candidate wrote to its standard output and error, over all of its
// starts, from the host's journal. Its container is gone, and with it what Podman could tell. It is done
// beside the rollback, which neither waits for it nor fails by it; what cannot be had is not kept.
func (s *service) keepOutput(ctx context.Context, cand *revision) {
	op := s.op()
	if op.StartedAt == nil || op.RollbackDeadline != nil { // nothing of it ran, or the target was started since
		return
	}
	// Of the lines by this name those of the candidate are the ones between its first start and now. The
	// journal may stamp the last of them a little later, and the target takes longer to its first.
	at := func(t time.Time) string { return fmt.Sprintf("@%d.%03d", t.Unix(), t.Nanosecond()/1e6) }
	since, until := at(*op.StartedAt), at(s.host.wall().Add(200*time.Millisecond))
	s.beside.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		err := func() error {
			select {
			case <-time.After(time.Second): // the journal takes lines in late
			case <-ctx.Done():
				return ctx.Err()
			}
			hostData, _, err := s.host.hostPaths(ctx)
			if err != nil {
				return err
			}
			name := filepath.Join("check", s.name, "output")
			if err := makeDir(filepath.Dir(filepath.Join(s.data.path, name))); err != nil {
				return err
			}
			defer os.Remove(filepath.Join(s.data.path, name))
			ok, err := s.host.units.Run(ctx, "toad-output-"+s.name+".service", []string{"/usr/bin/journalctl", "--user", "--no-pager", "--quiet", "--all", "--output=cat",
				fmt.Sprintf("--lines=%d", outputLines), "--since=" + since, "--until=" + until,
				"_SYSTEMD_USER_UNIT=" + serviceName(cand.Enrollment.Unit), "CONTAINER_NAME=" + cand.Container}, nil, filepath.Join(hostData, name))
			if err == nil && !ok {
				err = errors.New("journalctl failed")
			}
			if err != nil {
				return err
			}
			said, err := tail(filepath.Join(s.data.path, name), outputBytes)
			if err != nil {
				return err
			}
			if err := s.data.space(); err != nil {
				return err // the records need it more
			}
			if err := makeDir(filepath.Dir(s.outputPath(op.ID))); err != nil {
				return err
			}
			return writeFile(s.outputPath(op.ID), said)
		}()
		if err != nil {
			s.log.Warn("keeping the candidate's output", "operation", op.ID, "err", err)
		}
	})
}
