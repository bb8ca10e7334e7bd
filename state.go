// state.go keeps the records on disk: their form and versions, atomic and durable writes, and the
// locks. It knows nothing of Podman, systemd or HTTP. service.json is the one commit point of a
// service; every other file can be written again from it or is immutable.
package main

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

// recordVersion is the version of every record this binary writes.
const recordVersion = 1

// reserveSize is kept free in DATA/reserve, so that a rollout under way can still end on a full disk.
const reserveSize = 8 << 20

var (
	// errStorage wraps a failed durable write: what is on disk is unknown until it is read again.
	errStorage = errors.New("storage")
	// errLocked says that another toad works on the directory.
	errLocked = errors.New("another toad is at work")
	// errCorrupt wraps what is wrong with a record that was read.
	errCorrupt = errors.New("corrupt record")
	// errNewer wraps what is wrong with a record that a newer binary wrote: it is never replaced.
	errNewer = errors.New("newer record")
)

// storageError is a step on the disk that failed.
func storageError(doing, what string, err error) error {
	return fmt.Errorf("%s %s: %w: %w", doing, what, errStorage, err)
}

// state is the state of an operation.
type state string

const (
	preparing   state = "preparing"
	activating  state = "activating"
	inProbation state = "probation"
	promoting   state = "promoting"
	rollingBack state = "rolling_back"
	promoted    state = "promoted"
	rolledBack  state = "rolled_back"
	hasFailed   state = "failed"
)

// nextStates holds every edge there is. There is none out of a terminal state, and none from a
// rollback to another attempt, so that alternating between revisions is impossible.
var nextStates = map[state][]state{
	preparing:   {activating, hasFailed},
	activating:  {inProbation, hasFailed, rollingBack},
	inProbation: {promoting, rollingBack},
	promoting:   {promoted, inProbation, rollingBack},
	rollingBack: {rolledBack, hasFailed},
	promoted:    nil,
	rolledBack:  nil,
	hasFailed:   nil,
}

func (s state) terminal() bool { return s == promoted || s == rolledBack || s == hasFailed }

// Steps within a state, persisted before they are done.
const (
	stepStop   = "stop"   // stop the instance and confirm its termination
	stepWrite  = "write"  // write the unit, reload, read it back
	stepStart  = "start"  // start it
	stepVerify = "verify" // a rollback: see the target ready once
)

// deadline is an absolute instant on two clocks, so that neither a step of the wall clock nor a
// reboot moves it.
type deadline struct {
	At     time.Time `json:"at"`
	Boot   float64   `json:"boottime_seconds"` // CLOCK_BOOTTIME
	BootID string    `json:"boot_id"`          // the kernel's, for which Boot holds
}

// reference names a revision without its unit.
type reference struct {
	Generation int64  `json:"generation"`
	Image      string `json:"image"`    // repository@sha256:…
	ConfigID   string `json:"image_id"` // the config's digest, by which Podman names the image; "" before it was verified
	Operation  string `json:"operation_id"`
}

func (r reference) digest() string { return digestOf(r.Image) }

// promotedRevision is a reference with the fact of its promotion.
type promotedRevision struct {
	reference
	PromotedAt time.Time `json:"promoted_at"`
	ByRollback bool      `json:"by_rollback"` // it came by a requested rollback after promotion
}

// restarts counts the restarts of one attempt by systemd's counter and the invocation together.
// probe.go has its arithmetic.
type restarts struct {
	Count      int    `json:"count"`
	Before     string `json:"before"`     // the invocation before the last one seen, or before Toad's own start: not seen again
	Invocation string `json:"invocation"` // the last one seen
	NRestarts  uint32 `json:"n_restarts"` // systemd's counter as last seen
	Pending    bool   `json:"pending"`    // the last restart counted was scheduled and not seen to run yet
}

type transition struct {
	State state     `json:"state"`
	At    time.Time `json:"at"`
}

// operation is one rollout attempt. While under way, and until the next one is accepted, it lives in
// service.json; then in operations/<id>.json.
type operation struct {
	ID          string            `json:"id"`
	Kind        string            `json:"kind"` // deploy, or rollback: a requested one after promotion
	Key         string            `json:"key"`
	RequestHash string            `json:"request_sha256"` // of the request as sent
	RequestedBy string            `json:"requested_by"`
	Enrollment  string            `json:"enrollment_sha256"` // the enrollment it was accepted under
	Expected    int64             `json:"expected_generation"`
	Candidate   reference         `json:"candidate"`
	Previous    *promotedRevision `json:"previous"` // the target of a rollback

	State    state        `json:"state"`
	Step     string       `json:"step"`
	Timeline []transition `json:"timeline"`

	CreatedAt  time.Time  `json:"created_at"`
	UpdatedAt  time.Time  `json:"updated_at"`
	FinishedAt *time.Time `json:"finished_at"`

	FetchDeadline    *deadline `json:"fetch_deadline"`
	StopDeadline     *deadline `json:"stop_deadline"`
	RolloutDeadline  *deadline `json:"rollout_deadline"`
	StartupDeadline  *deadline `json:"startup_deadline"`
	RollbackDeadline *deadline `json:"rollback_deadline"`

	StartedAt  *time.Time `json:"started_at"` // before Toad's first start of the candidate, or of the target
	Starts     int        `json:"starts"`     // how often Toad itself meant to start it
	Boot       string     `json:"boot"`       // the boot of Toad's last start
	Restarts   restarts   `json:"restarts"`
	WasActive  bool       `json:"was_active"` // an invocation of the candidate was active once
	FirstReady *time.Time `json:"first_ready_at"`

	StabilitySeconds float64 `json:"stability_window_seconds"`
	RestartBudget    int     `json:"restart_budget"`
	Barrier          bool    `json:"barrier"` // enrolled: if it ends badly no other is taken until it is acknowledged

	ReadySeconds      float64  `json:"ready_for_seconds"` // of the promotion
	RollbackRequested bool     `json:"rollback_requested"`
	RollbackBy        string   `json:"rollback_requested_by"`
	Failure           *failure `json:"failure"`
}

// reached tells that the operation was in this state.
func (o *operation) reached(st state) bool {
	return slices.ContainsFunc(o.Timeline, func(t transition) bool { return t.State == st })
}

// held is set while an instance is not proven dead and nothing may be started.
type held struct {
	Operation string    `json:"operation_id"`
	Since     time.Time `json:"since"`
	Revision  reference `json:"revision"` // whose instance was being stopped
	Candidate bool      `json:"candidate"`
	Remains   []string  `json:"remains"` // in public words

	StartedAt *time.Time `json:"started_at"` // before the one start of the current revision that ends the hold
}

// suspension keeps a service down by request, over reboots, until it is resumed.
type suspension struct {
	Since   time.Time `json:"since"`
	By      string    `json:"by"`
	Remains []string  `json:"remains"` // of an instance that could not be proven dead, in public words
}

// resumption is a start of the current revision that was asked for and is not done yet.
type resumption struct {
	Since     time.Time  `json:"since"`
	By        string     `json:"by"`
	StartedAt *time.Time `json:"started_at"` // before the start
}

// barrier closes a service until the operation that raised it is acknowledged.
type barrier struct {
	Operation string    `json:"operation_id"`
	RaisedAt  time.Time `json:"raised_at"`
}

// retirement is the end of a service whose enrollment is gone. It stays until a later enrollment of that
// name takes a deployment.
type retirement struct {
	Since   time.Time `json:"since"`
	By      string    `json:"by"`
	Done    bool      `json:"done"`    // instance, unit and images are gone
	Remains []string  `json:"remains"` // of an instance that could not be proven dead, in public words
}

// record is service.json. What it does not say did not happen.
type record struct {
	Version        int               `json:"version"`
	Service        string            `json:"service"`
	Generation     int64             `json:"generation"`
	NextGeneration int64             `json:"next_generation"`
	Current        *promotedRevision `json:"current"`
	Rollback       *promotedRevision `json:"retained_rollback"`
	Installed      bool              `json:"installed"` // the promoted form of current was written and read back
	Held           *held             `json:"held"`
	Suspended      *suspension       `json:"suspended"`
	Resume         *resumption       `json:"resume"`
	Barrier        *barrier          `json:"barrier"`
	Retired        *retirement       `json:"retired"`
	Operation      *operation        `json:"operation"`
	Watch          restarts          `json:"watch"`      // restarts since promotion
	Containers     []string          `json:"containers"` // ids recorded for this service's unit, newest last
	EventHead      eventHead         `json:"event_head"` // the log's head before the events below
	Events         []event           `json:"events"`     // what this commit made known
	UpdatedAt      time.Time         `json:"updated_at"`
	SHA256         string            `json:"sha256"`
}

// revision is revisions/<generation>.json: immutable. Its rendered unit stands beside it.
type revision struct {
	Version    int        `json:"version"`
	Service    string     `json:"service"`
	Generation int64      `json:"generation"`
	Operation  string     `json:"operation_id"`
	Image      string     `json:"image"`
	Enrollment enrollment `json:"enrollment"`
	Container  string     `json:"container"`   // the container's name
	Network    string     `json:"network"`     // the readiness network as Podman names it
	UnitSHA256 string     `json:"unit_sha256"` // of the rendered unit
	CreatedAt  time.Time  `json:"created_at"`
	SHA256     string     `json:"sha256"`

	unit []byte // the rendered unit, promoted form
}

// archived is operations/<id>.json.
type archived struct {
	Version   int       `json:"version"`
	Service   string    `json:"service"`
	Operation operation `json:"operation"`
	SHA256    string    `json:"sha256"`
}

// keyFile is keys/<sha256 of key>.json. It is never pruned.
type keyFile struct {
	Version     int       `json:"version"`
	Operation   string    `json:"operation_id"`
	RequestHash string    `json:"request_sha256"`
	State       state     `json:"state"` // how the operation ended
	FinishedAt  time.Time `json:"finished_at"`
	SHA256      string    `json:"sha256"`
}

// check holds what must be true of every record, before each write and after each read. A record
// that breaks it is refused, never repaired.
func (r *record) check() error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{errCorrupt}, a...)...)
	}
	switch op := r.Operation; {
	case r.Generation < 0 || r.NextGeneration <= r.Generation:
		return bad("generation %d, next %d", r.Generation, r.NextGeneration)
	case r.Current != nil && r.Current.Generation > r.Generation: // below it only after a restore
		return bad("current revision has generation %d, the service %d", r.Current.Generation, r.Generation)
	case r.Rollback != nil && (r.Current == nil || r.Rollback.Generation >= r.Current.Generation):
		return bad("retained rollback is not older than the current revision")
	case op != nil && nextStates[op.State] == nil && !op.State.terminal():
		return bad("unknown state %q", op.State)
	case op != nil && op.Candidate.Generation >= r.NextGeneration:
		return bad("candidate generation %d was not taken from the counter", op.Candidate.Generation)
	case op != nil && op.State != promoted && r.Current != nil && op.Candidate.Generation == r.Current.Generation:
		return bad("current revision is an unpromoted candidate")
	case op != nil && op.State != promoted && r.Rollback != nil && op.Candidate.Generation == r.Rollback.Generation:
		return bad("retained rollback is an unpromoted candidate")
	case op != nil && !op.State.terminal() && r.Held != nil:
		return bad("an operation is under way while the service is held")
	case op != nil && !op.State.terminal() && (r.Suspended != nil || r.Retired != nil):
		return bad("an operation is under way while the service is suspended or retired")
	case op != nil && !op.State.terminal() && r.Barrier != nil:
		return bad("an operation is under way behind a barrier")
	case (r.Suspended != nil || r.Resume != nil) && r.Current == nil:
		return bad("a service without a current revision is suspended or resumed")
	case r.Suspended != nil && r.Resume != nil:
		return bad("it is suspended and resumed at once")
	case r.Suspended != nil && r.Installed:
		return bad("it is suspended, and its unit starts at boot")
	case r.Retired != nil && (r.Suspended != nil || r.Resume != nil):
		return bad("it is retired, and suspended or resumed")
	case r.Retired != nil && r.Retired.Done && (r.Current != nil || r.Held != nil):
		return bad("it is retired, and not everything of it is gone")
	case r.Barrier != nil && r.Barrier.Operation == "":
		return bad("a barrier that no operation raised")
	case op != nil && op.State.terminal() != (op.FinishedAt != nil):
		return bad("state %s does not fit finished_at", op.State)
	}
	return nil
}

// active returns the operation under way, or nil.
func (r *record) active() *operation {
	if r.Operation != nil && !r.Operation.State.terminal() {
		return r.Operation
	}
	return nil
}

// needs is the generation whose revision must be read for anything to be done now; 0: none.
func (r *record) needs() int64 {
	switch op := r.active(); {
	case op != nil && op.State == preparing:
		return 0
	case op != nil:
		return op.Candidate.Generation
	case r.Held != nil:
		return r.Held.Revision.Generation
	case r.Current != nil:
		return r.Current.Generation
	}
	return 0
}

// duty is what a service has to do with its host. Nothing but its own end or another duty ends one.
type duty string

const (
	rollingOut  duty = "rollout"
	retiring    duty = "retire"
	holding     duty = "hold"
	stayingDown duty = "stay down"
	resuming    duty = "resume"
	watching    duty = "watch"
)

func (r *record) duty() duty {
	switch {
	case r.active() != nil:
		return rollingOut
	case r.Retired != nil && !r.Retired.Done:
		return retiring
	case r.Held != nil:
		return holding
	case r.Suspended != nil:
		return stayingDown
	case r.Resume != nil:
		return resuming
	}
	return watching
}

// down tells that nothing of the service may be started.
func (r *record) down() bool { return r.Suspended != nil || r.Retired != nil }

// clone copies the record so deep that changing the copy never shows in the original.
func (r *record) clone() *record {
	c := *r
	c.Current, c.Rollback, c.Barrier, c.Resume = copyOf(r.Current), copyOf(r.Rollback), copyOf(r.Barrier), copyOf(r.Resume)
	if c.Held = copyOf(r.Held); c.Held != nil {
		c.Held.Remains = slices.Clone(c.Held.Remains)
	}
	if c.Suspended = copyOf(r.Suspended); c.Suspended != nil {
		c.Suspended.Remains = slices.Clone(c.Suspended.Remains)
	}
	if c.Retired = copyOf(r.Retired); c.Retired != nil {
		c.Retired.Remains = slices.Clone(c.Retired.Remains)
	}
	if c.Operation = copyOf(r.Operation); c.Operation != nil {
		c.Operation.Timeline = slices.Clone(c.Operation.Timeline)
	}
	c.Containers = slices.Clone(r.Containers)
	c.Events = slices.Clone(r.Events)
	return &c
}

// copyOf is a flat copy of what p points to; nil of nil.
func copyOf[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}

// testingOnlyBoundary is called before each durable step with its name (write, replace, syncdir, …) and the
// path it concerns. An error it returns is the step's own.
var testingOnlyBoundary func(step, path string) error

func boundary(step, path string) error {
	if testingOnlyBoundary != nil {
		return testingOnlyBoundary(step, path)
	}
	return nil
}

// writeFile replaces path by data and is durable when it returns nil: temporary file beside it, fsync,
// rename, fsync of the directory (which renameio leaves out). The temporary name begins with a dot
// and ends in digits, so that no generator and no reader takes it for a file of its own.
func writeFile(path string, data []byte) error { return writeFileMode(path, data, 0o600) }

func writeFileMode(path string, data []byte, mode fs.FileMode) error {
	dir := filepath.Dir(path)
	if err := boundary("write", path); err != nil {
		return storageError("writing", path, err)
	}
	t, err := renameio.NewPendingFile(path, renameio.WithTempDir(dir), renameio.WithStaticPermissions(mode))
	if err != nil {
		return storageError("writing", path, err)
	}
	defer t.Cleanup()
	if _, err := t.Write(data); err != nil {
		return storageError("writing", path, err)
	}
	if err := boundary("replace", path); err != nil {
		return storageError("replacing", path, err)
	}
	if err := t.CloseAtomicallyReplace(); err != nil { // fsync, close, rename
		return storageError("replacing", path, err)
	}
	return syncDir(dir)
}

// syncDir makes the names in a directory durable.
func syncDir(dir string) error {
	if err := boundary("syncdir", dir); err != nil {
		return storageError("syncing", dir, err)
	}
	return syncPath(dir)
}

// syncFile makes what was read durable: after a crash the page cache may show what the disk has not.
func syncFile(path string) error {
	if err := syncPath(path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return storageError("syncing", path, err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return storageError("syncing", path, err)
	}
	return nil
}

// makeDir makes a directory and its missing parents, each durable in the one above it.
func makeDir(dir string) error {
	if st, err := os.Stat(dir); err == nil {
		if !st.IsDir() {
			return fmt.Errorf("making %s: %w: a file is in the way", dir, errStorage)
		}
		return nil
	}
	if err := makeDir(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := boundary("mkdir", dir); err != nil {
		return storageError("making", dir, err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return storageError("making", dir, err)
	}
	return syncDir(filepath.Dir(dir))
}

// removeFile removes a file durably; one that is not there is no error.
func removeFile(path string) error {
	if err := boundary("remove", path); err != nil {
		return storageError("removing", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return storageError("removing", path, err)
	}
	// One that is gone already may have been removed by a predecessor that was killed before the sync.
	if _, err := os.Stat(filepath.Dir(path)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return syncDir(filepath.Dir(path))
}

// encodeRecord writes v, a struct whose last field is "sha256", as indented JSON with that field
// over all bytes before the line that holds it.
func encodeRecord(v any) ([]byte, error) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, err
	}
	i := bytes.LastIndex(b, []byte("  \"sha256\": "))
	if i < 0 {
		return nil, errors.New("a record without sha256")
	}
	return append(b[:i:i], sumLine(b[:i])...), nil
}

// sumLine is the end of a record that begins so.
func sumLine(b []byte) string { return fmt.Sprintf("  \"sha256\": %q\n}\n", sumHex(b)) }

// sumHex is the SHA-256 of data in hexadecimal digits.
func sumHex(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// decodeRecord reads what encodeRecord wrote into v: version first, then checksum, then strictly. What is
// not byte for byte as it would be written again has a field missing, twice, or under another name.
func decodeRecord(b []byte, v any) error {
	if err := checkSum(b); err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: %w", errCorrupt, err)
	}
	if again, err := encodeRecord(v); err != nil || !bytes.Equal(again, b) {
		return fmt.Errorf("%w: it is not in the form in which Toad writes it", errCorrupt)
	}
	return nil
}

// checkSum tells whether a record is of a known version and as it was written.
func checkSum(b []byte) error {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return fmt.Errorf("%w: %w", errCorrupt, err)
	}
	switch {
	case head.Version > recordVersion:
		return fmt.Errorf("%w: %w: version %d is newer than this binary's %d; run the newer binary", errCorrupt, errNewer, head.Version, recordVersion)
	case head.Version < 1:
		return fmt.Errorf("%w: no version", errCorrupt)
	}
	i := bytes.LastIndex(b, []byte("  \"sha256\": "))
	if i < 0 {
		return fmt.Errorf("%w: no checksum", errCorrupt)
	}
	if string(b[i:]) != sumLine(b[:i]) {
		return fmt.Errorf("%w: checksum does not match", errCorrupt)
	}
	return nil
}

// writeRecord writes a record durably. What it replaces, if it is whole, is kept as path+".prev", which
// serves a restore asked for by name and is never read otherwise.
func writeRecord(path string, v any) error {
	b, err := encodeRecord(v)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", path, err)
	}
	if old, err := os.ReadFile(path); err == nil && checkSum(old) == nil {
		if err := boundary("keep", path); err != nil {
			return storageError("keeping the predecessor of", path, err)
		}
		tmp := path + ".prev.new"
		os.Remove(tmp)
		if err := errors.Join(os.Link(path, tmp), os.Rename(tmp, path+".prev")); err != nil {
			return storageError("keeping the predecessor of", path, err)
		}
		os.Remove(tmp) // renaming does nothing if a killed predecessor came as far: both are one file
	}
	return writeFile(path, b)
}

// readRecord reads a record. fs.ErrNotExist if there is none, errCorrupt if it is not to be trusted.
func readRecord(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := decodeRecord(b, v); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}

// dataDir is DATA, in the hands of the one process that has its locks.
type dataDir struct {
	path, quadlets string
	id             string // DATA/id
	own            ownLog // Toad's own events
	locks          []*flock.Flock
}

// lockData takes both locks: whoever has them alone may read and write the directory. Nothing is read
// before they are held.
func lockData(path, quadlets string) (*dataDir, error) {
	d := &dataDir{path: path, quadlets: quadlets, own: ownLog{path: filepath.Join(path, "events.jsonl"), headPath: filepath.Join(path, "events.head.json"), tally: newTally()}}
	for _, of := range []struct{ what, dir string }{{"data", path}, {"Quadlet", quadlets}} {
		what, dir := of.what, of.dir
		if st, err := os.Stat(dir); err != nil {
			return nil, fmt.Errorf("opening the %s directory %s: %w; make it, owned by the user that runs Toad", what, dir, err)
		} else if !st.IsDir() {
			return nil, fmt.Errorf("opening the %s directory %s: it is not a directory", what, dir)
		}
		// A lock that is there already can be taken in a directory that cannot be written.
		if err := unix.Access(dir, unix.R_OK|unix.W_OK|unix.X_OK); errors.Is(err, unix.EROFS) {
			return nil, fmt.Errorf("opening the %s directory %s: %w; mount it writable", what, dir, err)
		} else if err != nil {
			return nil, fmt.Errorf("opening the %s directory %s: %w; it must belong to the user that runs Toad, and be readable and writable for it", what, dir, err)
		}
	}
	for _, name := range []string{filepath.Join(path, "lock"), filepath.Join(quadlets, ".toad.lock")} {
		l := flock.New(name, flock.SetPermissions(0o600))
		if ok, err := l.TryLock(); err != nil {
			d.close()
			return nil, fmt.Errorf("locking %s: %w; the directory must be writable by the user that runs Toad", name, err)
		} else if !ok {
			d.close()
			return nil, fmt.Errorf("%w: %s is held%s; stop that one first", errLocked, name, holder(name))
		}
		d.locks = append(d.locks, l)
	}
	host, _ := os.Hostname()
	note := fmt.Sprintf("process %d on %s\n", os.Getpid(), host)
	for _, l := range d.locks { // for a reader only: the lock is the flock, never the content
		_ = os.WriteFile(l.Path(), []byte(note), 0o600)
	}
	return d, nil
}

// openData opens the directory for the one server: it takes the locks, proves that the directory can be
// written, and removes what a killed predecessor left half written.
func openData(path, quadlets string) (*dataDir, error) {
	d, err := lockData(path, quadlets)
	if err != nil {
		return nil, err
	}
	if err := d.open(); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *dataDir) open() error {
	if err := sweepTemporary(d.path); err != nil {
		return err
	}
	for _, sub := range []string{"run", "services", "check"} {
		if err := makeDir(filepath.Join(d.path, sub)); err != nil {
			return err
		}
	}
	id, err := d.readID()
	if errors.Is(err, fs.ErrNotExist) {
		if names, _ := d.services(); len(names) > 0 {
			return fmt.Errorf("%w; it is missing, and services are not: put it back from a backup", err)
		}
		d.id = strings.ToLower(rand.Text())
		return writeFile(filepath.Join(d.path, "id"), []byte(d.id+"\n"))
	} else if err != nil {
		return err
	}
	d.id = id
	return syncFile(filepath.Join(d.path, "id")) // units will carry it
}

// readID reads DATA/id. Only who opens the directory sets d.id: a running server goes on under its own.
func (d *dataDir) readID() (string, error) {
	b, err := os.ReadFile(filepath.Join(d.path, "id"))
	if err != nil {
		return "", fmt.Errorf("reading the id: %w", err)
	}
	id := strings.TrimSpace(string(b))
	if !dataID.MatchString(id) {
		return "", fmt.Errorf("reading the id: %w: put it back from a backup", errCorrupt)
	}
	return id, nil
}

// holder says who noted itself in a lock file, for a message only.
func holder(lock string) string {
	if b, err := os.ReadFile(lock); err == nil && len(bytes.TrimSpace(b)) > 0 {
		return fmt.Sprintf(" by %s", bytes.TrimSpace(b))
	}
	return ""
}

func (d *dataDir) close() {
	for _, l := range d.locks {
		l.Unlock()
	}
}

// room sees that the reserve is there, making it again when space has come back. Admission stops
// without it, while a rollout under way may use it up.
func (d *dataDir) room() error {
	path := filepath.Join(d.path, "reserve")
	if st, err := os.Stat(path); err == nil && st.Size() == reserveSize {
		return d.space()
	}
	if err := boundary("reserve", path); err != nil {
		return storageError("making", path, err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		if err = syscall.Fallocate(int(f.Fd()), 0, 0, reserveSize); errors.Is(err, syscall.EOPNOTSUPP) {
			_, err = f.Write(make([]byte, reserveSize))
		}
		if err == nil {
			err = f.Sync()
		}
		f.Close()
	}
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("making %s: %w: %w; free some space", path, errStorage, err)
	}
	if err := syncDir(d.path); err != nil {
		return err
	}
	return d.space()
}

// space sees that beside the reserve there is room for the records of one rollout.
func (d *dataDir) space() error {
	var st syscall.Statfs_t
	switch err := syscall.Statfs(d.path, &st); {
	case err != nil:
		return storageError("asking for the free space of", d.path, err)
	case st.Bavail*uint64(st.Bsize) < 1<<20:
		return fmt.Errorf("%w: %w: less than 1 MiB is free in %s", errStorage, syscall.ENOSPC, d.path)
	case st.Files > 0 && st.Ffree < 32: // some file systems make inodes as they go, and count none
		return fmt.Errorf("%w: %w: only %d inodes are free in %s", errStorage, syscall.ENOSPC, st.Ffree, d.path)
	}
	return nil
}

// withReserve writes; on a full disk once more with the reserve's room.
func (d *dataDir) withReserve(write func() error) error {
	err := write()
	if errors.Is(err, syscall.ENOSPC) && os.Remove(filepath.Join(d.path, "reserve")) == nil {
		err = write()
	}
	return err
}

// save commits a service's record, on a full disk with the reserve's help.
func (d *dataDir) save(r *record) error {
	path := d.serviceFile(r.Service, "service.json")
	if err := r.check(); err != nil {
		return fmt.Errorf("refusing to write %s: %w", path, err)
	}
	return d.withReserve(func() error { return writeRecord(path, r) })
}

func (d *dataDir) serviceFile(service string, parts ...string) string {
	return filepath.Join(append([]string{d.path, "services", service}, parts...)...)
}

// services lists the services that have state, sorted.
func (d *dataDir) services() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(d.path, "services"))
	if err != nil {
		return nil, fmt.Errorf("listing services: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() && serviceID.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// load reads a service's record; a new one if the service has none yet. Whatever is returned is
// durable, because the host may be changed on its word.
func (d *dataDir) load(service string) (*record, error) {
	path := d.serviceFile(service, "service.json")
	r := &record{}
	err := readRecord(path, r)
	if errors.Is(err, fs.ErrNotExist) {
		if left, _ := filepath.Glob(d.serviceFile(service, "*", "*.json")); len(left) > 0 {
			return nil, fmt.Errorf("reading %s: %w: it is missing, and other records of the service are not", path, errCorrupt)
		}
		return &record{Version: recordVersion, Service: service, NextGeneration: 1}, nil
	}
	if err != nil {
		return nil, err
	}
	if r.Service != service {
		return nil, fmt.Errorf("reading %s: %w: it is of service %q", path, errCorrupt, r.Service)
	}
	if err := r.check(); err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return r, syncFile(path)
}

// saveRevision writes a revision: the unit first, the record that vouches for it second.
func (d *dataDir) saveRevision(rev *revision) error {
	dir := d.serviceFile(rev.Service, "revisions")
	if err := makeDir(dir); err != nil {
		return err
	}
	rev.UnitSHA256 = sumHex(rev.unit)
	base := filepath.Join(dir, fmt.Sprint(rev.Generation))
	if err := writeFile(base+".container", rev.unit); err != nil {
		return err
	}
	return writeRecord(base+".json", rev)
}

// syncRevision makes a revision that was found durable: a kill may have come between its rename and the
// sync of its directory.
func (d *dataDir) syncRevision(rev *revision) error {
	base := d.serviceFile(rev.Service, "revisions", fmt.Sprint(rev.Generation))
	if err := syncFile(base + ".container"); err != nil {
		return err
	}
	return syncFile(base + ".json")
}

// revision reads a revision and its unit, and proves that they belong together.
func (d *dataDir) revision(service string, generation int64) (*revision, error) {
	base := d.serviceFile(service, "revisions", fmt.Sprint(generation))
	rev := &revision{}
	if err := readRecord(base+".json", rev); err != nil {
		return nil, err
	}
	unit, err := os.ReadFile(base + ".container")
	if err != nil {
		return nil, err
	}
	if rev.Service != service || rev.Generation != generation || rev.UnitSHA256 != sumHex(unit) {
		return nil, fmt.Errorf("reading %s.json: %w: record and unit do not belong together", base, errCorrupt)
	}
	rev.unit = unit
	return rev, nil
}

// archive writes an ended operation and its key, both durable when it returns.
func (d *dataDir) archive(service string, op *operation) error {
	for _, sub := range []string{"operations", "keys"} {
		if err := makeDir(d.serviceFile(service, sub)); err != nil {
			return err
		}
	}
	path := d.serviceFile(service, "operations", op.ID+".json")
	if err := writeOnce(path, &archived{Version: recordVersion, Service: service, Operation: *op}); err != nil || op.Key == "" {
		return err // of one without a key the event log alone told, after a restore
	}
	return writeOnce(d.keyPath(service, op.Key), &keyFile{Version: recordVersion, Operation: op.ID, RequestHash: op.RequestHash,
		State: op.State, FinishedAt: *op.FinishedAt})
}

// writeOnce writes a record that never changes. One that is found is made durable: it may have been renamed
// and not synced before a kill.
func writeOnce(path string, v any) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return writeRecord(path, v)
	} else if err != nil {
		return storageError("looking for", path, err)
	}
	return syncFile(path)
}

func (d *dataDir) keyPath(service, key string) string {
	return d.serviceFile(service, "keys", sumHex([]byte(key))+".json")
}

// key looks a key up among the ended operations; errNotFound if it was never used.
func (d *dataDir) key(service, key string) (*keyFile, error) {
	k := &keyFile{}
	if err := readRecord(d.keyPath(service, key), k); errors.Is(err, fs.ErrNotExist) {
		return nil, errNotFound
	} else if err != nil {
		return nil, err
	}
	return k, nil
}

// operation reads an archived operation; errNotFound if there is none.
func (d *dataDir) operation(service, id string) (*operation, error) {
	a := &archived{}
	if err := readRecord(d.serviceFile(service, "operations", id+".json"), a); errors.Is(err, fs.ErrNotExist) {
		return nil, errNotFound
	} else if err != nil {
		return nil, err
	}
	if a.Service != service || a.Operation.ID != id {
		return nil, fmt.Errorf("reading operation %s: %w: it holds another", id, errCorrupt)
	}
	return &a.Operation, nil
}

// operationIDs lists the archived operations of a service, newest first (their ids sort by time).
func (d *dataDir) operationIDs(service string) ([]string, error) {
	entries, err := os.ReadDir(d.serviceFile(service, "operations"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listing operations: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(e.Name(), ".json"); ok && operationID.MatchString(id) {
			ids = append(ids, id)
		}
	}
	slices.Reverse(ids) // a directory is read in the order of its names
	return ids, nil
}

// How many ended operations of a service are kept: the newest, and those younger than the age,
// whichever keeps more, but never more than the most.
const (
	keepOperations     = 1000
	keepAge            = 90 * 24 * time.Hour
	keepOperationsMost = 10_000
)

// prune removes ended operations beyond what is kept, with their revisions. What the record refers
// to stays.
func (d *dataDir) prune(r *record, now time.Time) error {
	ids, err := d.operationIDs(r.Service)
	if err != nil || len(ids) <= keepOperations {
		return err
	}
	refers := func(op *operation) bool {
		g := op.Candidate.Generation
		return r.Current != nil && r.Current.Generation == g || r.Rollback != nil && r.Rollback.Generation == g ||
			r.Operation != nil && (r.Operation.ID == op.ID || r.Operation.Previous != nil && r.Operation.Previous.Generation == g) ||
			r.Held != nil && (r.Held.Operation == op.ID || r.Held.Revision.Generation == g) ||
			r.Barrier != nil && r.Barrier.Operation == op.ID
	}
	for i := len(ids) - 1; i >= keepOperations; i-- {
		if i < keepOperationsMost && now.Sub(idTime(ids[i])) < keepAge {
			break
		}
		op, err := d.operation(r.Service, ids[i])
		if err != nil || refers(op) {
			continue // a damaged record is fsck's to report, not ours to lose
		}
		base := d.serviceFile(r.Service, "operations", ids[i])
		rev := d.serviceFile(r.Service, "revisions", fmt.Sprint(op.Candidate.Generation))
		for _, path := range []string{rev + ".json", rev + ".container", base + ".log", base + ".output", base + ".json"} {
			if err := removeFile(path); err != nil {
				return err
			}
		}
	}
	return nil
}

// sweepTemporary removes what a killed predecessor left half written. Only under the lock.
func sweepTemporary(dir string) error {
	return filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return fmt.Errorf("sweeping %s: %w; the directory must belong to the user that runs Toad", path, err)
		}
		if !e.IsDir() && (temporaryName.MatchString(e.Name()) || strings.HasSuffix(e.Name(), ".prev.new")) {
			return removeFile(path)
		}
		return nil
	})
}

// renameio names its temporary files .<name><random digits>.
var temporaryName = regexp.MustCompile(`^\..+[0-9]{6,}$`)

var (
	serviceID   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)
	operationID = regexp.MustCompile(`^[0-9a-z]{26}$`)
	dataID      = regexp.MustCompile(`^[a-z2-7]{26}$`)
)

const crockford = "0123456789abcdefghjkmnpqrstvwxyz"

// newOperationID makes an id that sorts by time: ten characters of Unix milliseconds, 16 random ones.
func newOperationID(now time.Time) string {
	var b [26]byte
	ms := now.UnixMilli()
	for i := 9; i >= 0; i-- {
		b[i] = crockford[ms&31]
		ms >>= 5
	}
	rand.Read(b[10:])
	for i := 10; i < 26; i++ {
		b[i] = crockford[b[i]&31]
	}
	return string(b[:])
}

// idTime is the time in an operation's id.
func idTime(id string) time.Time {
	var ms int64
	for _, c := range []byte(id[:10]) {
		ms = ms<<5 | int64(max(strings.IndexByte(crockford, c), 0))
	}
	return time.UnixMilli(ms)
}

// digestOf is the sha256:… of a reference repository@sha256:….
func digestOf(image string) string {
	_, digest, _ := strings.Cut(image, "@")
	return digest
}

// seconds is a duration as records and answers write it.
func seconds(d time.Duration) float64 { return math.Round(d.Seconds()*1000) / 1000 }

// tail reads at most the last n bytes of a file that is appended to.
func tail(path string, n int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > n {
		if _, err := f.Seek(-n, io.SeekEnd); err != nil {
			return nil, err
		}
	}
	return io.ReadAll(f)
}

// ownEvent adds a line to Toad's own event log.
func (d *dataDir) ownEvent(typ, detail string) error {
	return d.own.write(event{Type: typ, Actor: "toad", Detail: detail})
}
