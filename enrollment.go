// enrollment.go reads and judges what infrastructure declares for each service. It only reads: it never
// changes the host, talks to nothing, and decides nothing about a rollout. Whoever runs a rollout uses the
// enrollment that its revision carries; the directory read here is for admission only.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// enrollment is the operator's declaration for one service.
type enrollment struct {
	Version       int       `json:"version"`
	Service       string    `json:"service"`
	Unit          string    `json:"unit"`
	Repository    string    `json:"repository"`
	ImageLimit    byteSize  `json:"image_limit"`
	Readiness     readiness `json:"readiness"`
	Probation     probation `json:"probation"`
	FetchDeadline duration  `json:"fetch_deadline"`
	StopDeadline  duration  `json:"stop_deadline"`
	Barrier       bool      `json:"barrier"`
}

type readiness struct {
	Scheme   string   `json:"scheme,omitempty"` // "http" (default) or "https"
	Insecure bool     `json:"insecure,omitempty"`
	Port     int      `json:"port"`
	Path     string   `json:"path"`
	Network  string   `json:"network"` // the Quadlet's name without ".network"
	Host     string   `json:"host,omitempty"`
	Status   int      `json:"status,omitempty"` // 0: any 2xx
	Interval duration `json:"interval"`
	Timeout  duration `json:"timeout"`
}

type probation struct {
	RolloutDeadline duration `json:"rollout_deadline"`
	StabilityWindow duration `json:"stability_window"`
	RestartBudget   int      `json:"restart_budget"`
	StartupDeadline duration `json:"startup_deadline,omitempty"` // 0: none
}

// enrolled is one enrollment as read: the declaration, its template, and what follows from both.
// It is shared, never changed. With Err set everything else may be incomplete and nothing may be
// deployed by it; its service may then be any file name, not even an identifier.
type enrolled struct {
	enrollment
	Template      []byte
	Hash          string // SHA-256 over both files
	ContainerName string
	NetworkName   string // Podman's name of readiness.network; "" without a Quadlet directory
	Err           error

	file  string         // of the declaration
	lines map[string]int // line of each of its fields
}

// enrollOptions is what the rules of an enrollment need to know beside its own files.
type enrollOptions struct {
	quadlets       string           // the Quadlet directory; "": networks and drop-ins are not checked
	reserved       []string         // names that no enrolled unit or container may have
	claims         map[string]claim // by service: what a service with a revision runs as
	forbiddenPaths []string         // what no service may reach, Toad's data directory first; nil: its usual place
	home           string           // the service user's home, for %h; "": derived from forbiddenPaths
}

// claim is the unit and the container name of a service that has a revision.
type claim struct{ unit, container string }

// usualData is where the data directory is when nobody says otherwise, as in a check without a host.
const usualData = "/home/toad/.local/share/toad"

const maxEnrollmentFile = 1 << 20

var (
	unitRE       = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,199}\.container$`)
	podmanNameRE = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`) // containers, networks, volumes
	repositoryRE = regexp.MustCompile(`^(localhost|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:[0-9]{1,5})?(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)+$`)
	hostRE       = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]{1,5})?$`)
)

// duration is a Go duration in its string form in enrollment files ("1m30s").
type duration time.Duration

func (d duration) String() string {
	s := time.Duration(d).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

func (d duration) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

func (d *duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil || string(b) == "null" {
		return errors.New(`want a duration such as "30s" or "1m30s"`)
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf(`%q is no duration: want one such as "30s" or "1m30s"`, s)
	}
	*d = duration(v)
	return nil
}

// byteSize is a number of bytes: "4GiB", "512MiB", "1KiB", or plain bytes.
type byteSize int64

var byteUnits = []struct {
	suffix string
	shift  uint
}{{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}}

func (n byteSize) String() string {
	for _, u := range byteUnits {
		if n != 0 && n%(1<<u.shift) == 0 {
			return strconv.FormatInt(int64(n>>u.shift), 10) + u.suffix
		}
	}
	return strconv.FormatInt(int64(n), 10)
}

func (n byteSize) MarshalJSON() ([]byte, error) {
	s := n.String()
	if strings.HasSuffix(s, "B") {
		return json.Marshal(s)
	}
	return []byte(s), nil
}

func (n *byteSize) UnmarshalJSON(b []byte) error {
	s := string(b)
	if strings.HasPrefix(s, `"`) {
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
	}
	digits, shift := s, uint(0)
	for _, u := range byteUnits {
		if d, ok := strings.CutSuffix(s, u.suffix); ok {
			digits, shift = d, u.shift
		}
	}
	v, err := strconv.ParseUint(digits, 10, 63)
	if err != nil || v > math.MaxInt64>>shift {
		return fmt.Errorf(`%s is no size: want one such as "512MiB", "4GiB" or a number of bytes`, b)
	}
	*n = byteSize(v << shift)
	return nil
}

// Decoding.

type enrollmentField struct {
	path     string
	into     any
	optional bool
}

// fields lists every field of an enrollment file. One that is not here is unknown.
func (e *enrollment) fields() []enrollmentField {
	return []enrollmentField{
		{"version", &e.Version, false},
		{"service", &e.Service, false},
		{"unit", &e.Unit, false},
		{"repository", &e.Repository, false},
		{"image_limit", &e.ImageLimit, false},
		{"readiness.scheme", &e.Readiness.Scheme, true},
		{"readiness.insecure", &e.Readiness.Insecure, true},
		{"readiness.port", &e.Readiness.Port, false},
		{"readiness.path", &e.Readiness.Path, false},
		{"readiness.network", &e.Readiness.Network, false},
		{"readiness.host", &e.Readiness.Host, true},
		{"readiness.status", &e.Readiness.Status, true},
		{"readiness.interval", &e.Readiness.Interval, false},
		{"readiness.timeout", &e.Readiness.Timeout, false},
		{"probation.rollout_deadline", &e.Probation.RolloutDeadline, false},
		{"probation.stability_window", &e.Probation.StabilityWindow, false},
		{"probation.restart_budget", &e.Probation.RestartBudget, false},
		{"probation.startup_deadline", &e.Probation.StartupDeadline, true},
		{"fetch_deadline", &e.FetchDeadline, false},
		{"stop_deadline", &e.StopDeadline, false},
		{"barrier", &e.Barrier, false},
	}
}

// decodeEnrollment reads an enrollment file strictly: each field once, all that are required, no
// other. It returns the line of each field that is there; an error names file, line and field.
func decodeEnrollment(file string, data []byte) (enrollment, map[string]int, error) {
	var e enrollment
	p := &problems{}
	lineAt := func(offset int64) int { return 1 + bytes.Count(data[:min(int(offset), len(data))], []byte("\n")) }

	var whole any
	if err := json.Unmarshal(data, &whole); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return e, nil, fmt.Errorf("%s:%d: not JSON: %v", file, lineAt(syntax.Offset), err)
		}
		return e, nil, fmt.Errorf("%s: not JSON: %v", file, err)
	}
	if _, ok := whole.(map[string]any); !ok {
		return e, nil, fmt.Errorf("%s:1: want one JSON object", file)
	}

	fields := e.fields()
	lines, values := map[string]int{}, map[string]json.RawMessage{}
	groups := map[string]bool{}
	for _, f := range fields {
		if g, _, ok := strings.Cut(f.path, "."); ok {
			groups[g] = true
		}
	}
	// The text is known to be valid from here: the walk cannot fail.
	var walk func(prefix string, base int64, raw []byte)
	walk = func(prefix string, base int64, raw []byte) {
		dec := json.NewDecoder(bytes.NewReader(raw))
		_, _ = dec.Token()
		for dec.More() {
			t, err := dec.Token()
			key, ok := t.(string)
			if err != nil || !ok {
				return
			}
			name := prefix + key
			line := lineAt(base + dec.InputOffset())
			var v json.RawMessage
			if dec.Decode(&v) != nil {
				return
			}
			if lines[name] != 0 {
				p.add(file, line, "field %q stands twice: remove one", name)
				continue
			}
			lines[name], values[name] = line, v
			if prefix == "" && groups[key] {
				if v[0] != '{' {
					p.add(file, line, "%s: want an object", name)
					continue
				}
				walk(name+".", base+dec.InputOffset()-int64(len(v)), v)
			}
		}
	}
	walk("", 0, data)

	for _, f := range fields {
		group, _, nested := strings.Cut(f.path, ".")
		raw, ok := values[f.path]
		switch {
		case ok:
			if err := decodeField(raw, f.into); err != nil {
				p.add(file, lines[f.path], "%s: %v", f.path, err)
			}
		case nested && lines[group] == 0:
			p.add(file, 0, "field %q is missing: add it", group)
			lines[group] = -1 // said once
		case !f.optional && lines[group] >= 0 && (!nested || values[group][0] == '{'):
			p.add(file, max(lines[group], 0), "field %q is missing: add it", f.path)
		}
		delete(values, f.path)
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if !groups[name] {
			p.add(file, lines[name], "unknown field %q: remove it", name)
		}
	}
	return e, lines, p.err()
}

func decodeField(raw json.RawMessage, into any) error {
	if string(raw) != "null" {
		err := json.Unmarshal(raw, into)
		if wrong := new(json.UnmarshalTypeError); !errors.As(err, &wrong) {
			return err
		}
	}
	switch into.(type) {
	case *string:
		return fmt.Errorf("want a string, not %s", raw)
	case *bool:
		return fmt.Errorf("want true or false, not %s", raw)
	case *int:
		return fmt.Errorf("want a whole number, not %s", raw)
	}
	return fmt.Errorf("want a value, not %s", raw)
}

// problems collects everything that is wrong, so that one look shows all of it.
type problems struct{ errs []error }

func (p *problems) add(file string, line int, format string, args ...any) {
	at := file
	if line > 0 {
		at = fmt.Sprintf("%s:%d", file, line)
	}
	p.errs = append(p.errs, fmt.Errorf("%s: %w", at, fmt.Errorf(format, args...)))
}

func (p *problems) err() error { return errors.Join(p.errs...) }

// Reading the directory.

// readEnrollments reads every enrollment of a directory with its template. A broken one has its Err
// set and disables only itself; the error returned is that the directory could not be read.
func readEnrollments(dir string, opts enrollOptions) (map[string]enrolled, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("reading enrollments: %w", err)
	}
	var tree *quadletTree
	if opts.quadlets != "" {
		if tree, err = readQuadletTree(opts.quadlets); err != nil {
			return nil, fmt.Errorf("reading the Quadlet directory: %w", err)
		}
	}
	all := map[string]enrolled{}
	for _, f := range files {
		name, ok := strings.CutSuffix(f.Name(), ".json")
		if ok && !strings.HasPrefix(name, ".") {
			all[name] = readEnrollment(dir, name, tree, opts)
		}
	}
	refuseConflicts(all, opts)
	return all, nil
}

func readEnrollment(dir, service string, tree *quadletTree, opts enrollOptions) (e enrolled) {
	file := filepath.Join(dir, service+".json")
	e.Service, e.file = service, file
	fail := func(err error) enrolled {
		e.Service, e.Err = service, err
		return e
	}
	if !serviceID.MatchString(service) {
		return fail(fmt.Errorf("%s: %q is no service identifier: name the file with 1 to 40 of a-z, 0-9 and inner hyphens", file, service))
	}
	text, err := readBounded(file)
	if err != nil {
		return fail(err)
	}
	declared, lines, err := decodeEnrollment(file, text)
	e.enrollment, e.lines = declared, lines
	if err != nil {
		return fail(err)
	}
	p := &problems{}
	e.checkFields(p)
	if !unitRE.MatchString(e.Unit) {
		e.Unit = "" // it must not be used as a path
		return fail(p.err())
	}
	template := filepath.Join(dir, e.Unit)
	if e.Template, err = readBounded(template); err != nil {
		p.add(file, lines["unit"], "unit names a template that cannot be read: %w: put it beside this file", err)
		return fail(p.err())
	}
	e.Hash = hashFiles(text, e.Template)
	e.checkTemplate(p, template, tree, opts)
	return fail(p.err())
}

// readBounded reads a regular file of sensible size.
func readBounded(file string) ([]byte, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxEnrollmentFile {
		return nil, fmt.Errorf("%s is no regular file of at most %v", file, byteSize(maxEnrollmentFile))
	}
	return os.ReadFile(file)
}

// hashFiles hashes texts with their lengths, so that no byte can move from one to the next unseen.
func hashFiles(texts ...[]byte) string {
	h := sha256.New()
	for _, t := range texts {
		_ = binary.Write(h, binary.BigEndian, uint64(len(t)))
		h.Write(t)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// checkFields judges the declaration alone.
func (e *enrolled) checkFields(p *problems) {
	bad := func(field, format string, args ...any) {
		p.add(e.file, e.lines[field], field+": "+format, args...)
	}
	if e.Version != 1 {
		bad("version", "this Toad knows version 1 only, not %d", e.Version)
	}
	if want := strings.TrimSuffix(filepath.Base(e.file), ".json"); e.Service != want {
		bad("service", "%q is not the file's name: make it %q", e.Service, want)
	}
	if !unitRE.MatchString(e.Unit) {
		bad("unit", "%q is no plain file name NAME.container of a-z, 0-9, _ and -", e.Unit)
	}
	e.checkRepository(bad)
	if e.ImageLimit <= 0 {
		bad("image_limit", "must be above 0")
	}

	r := e.Readiness
	if e.lines["readiness.scheme"] != 0 && r.Scheme != "http" && r.Scheme != "https" {
		bad("readiness.scheme", `want "http" or "https", not %q`, r.Scheme)
	}
	if r.Insecure && r.Scheme != "https" {
		bad("readiness.insecure", `makes sense with scheme "https" only: remove it`)
	}
	if r.Port < 1 || r.Port > 65535 {
		bad("readiness.port", "%d is no port: want 1 to 65535", r.Port)
	}
	if _, err := url.ParseRequestURI(r.Path); err != nil || r.Path[0] != '/' ||
		strings.ContainsFunc(r.Path, func(c rune) bool { return c <= ' ' || c > '~' || c == '#' }) {
		bad("readiness.path", `%q is no path: want one that begins with "/", without spaces, "#" or control characters`, r.Path)
	}
	if !isNetwork(r.Network) {
		bad("readiness.network", `%q is no network: want the Quadlet's name without ".network"`, r.Network)
	}
	if e.lines["readiness.host"] != 0 && !hostRE.MatchString(r.Host) {
		bad("readiness.host", "%q is no host name", r.Host)
	}
	if e.lines["readiness.status"] != 0 && (r.Status < 100 || r.Status > 599) {
		bad("readiness.status", "%d is no HTTP status: want 100 to 599, or no such field for any 2xx", r.Status)
	}

	b := e.Probation
	positive := true
	for _, d := range []struct {
		field string
		value duration
	}{
		{"readiness.interval", r.Interval}, {"readiness.timeout", r.Timeout},
		{"probation.rollout_deadline", b.RolloutDeadline}, {"probation.stability_window", b.StabilityWindow},
		{"probation.startup_deadline", b.StartupDeadline},
		{"fetch_deadline", e.FetchDeadline}, {"stop_deadline", e.StopDeadline},
	} {
		if e.lines[d.field] != 0 && d.value <= 0 {
			bad(d.field, "must be above 0")
			positive = false
		}
	}
	if b.RestartBudget < 0 {
		bad("probation.restart_budget", "must not be negative")
	}
	if !positive {
		return
	}
	if r.Interval > b.StabilityWindow/3 {
		bad("readiness.interval", "%v is above a third of the stability_window of %v: a window must hold three looks", r.Interval, b.StabilityWindow)
	}
	if b.StartupDeadline > b.RolloutDeadline-b.StabilityWindow {
		bad("probation.startup_deadline", "%v and the stability_window of %v are more than the rollout_deadline of %v: a candidate ready at the last moment could not be promoted", b.StartupDeadline, b.StabilityWindow, b.RolloutDeadline)
	}
	if e.StopDeadline > b.RolloutDeadline-b.StabilityWindow {
		bad("stop_deadline", "%v and the stability_window of %v are more than the rollout_deadline of %v: a slow stop would leave no whole window", e.StopDeadline, b.StabilityWindow, b.RolloutDeadline)
	}
}

func isNetwork(name string) bool {
	return podmanNameRE.MatchString(name) && !strings.HasSuffix(name, ".network")
}

func (e *enrolled) checkRepository(bad func(field, format string, args ...any)) {
	host, rest, _ := strings.Cut(e.Repository, "/")
	switch last := path.Base(rest); {
	case strings.Contains(e.Repository, "@"):
		bad("repository", "%q has a digest: requests bring that, leave it out", e.Repository)
	case strings.Contains(last, ":"):
		bad("repository", "%q has a tag: deployments are by digest only, leave it out", e.Repository)
	case e.Repository != strings.ToLower(e.Repository):
		bad("repository", "%q must be lower-case", e.Repository)
	case rest == "" || host != "localhost" && !strings.ContainsAny(host, ".:"):
		bad("repository", "%q must begin with the registry's host, as in registry.example.org/apps/hello", e.Repository)
	case !repositoryRE.MatchString(e.Repository):
		bad("repository", "%q is no repository: want HOST[:PORT]/PATH", e.Repository)
	}
}

// ownPrefix begins the names of Toad's own units: the transient toad-check-SERVICE.service and
// toad-output-SERVICE.service, and the gateway's.
const ownPrefix = "toad-"

// refuseConflicts refuses names that are reserved, that two services want, or that are no longer the
// ones a service runs under. Whoever has a revision under a name keeps it.
func refuseConflicts(all map[string]enrolled, opts enrollOptions) {
	type name struct{ kind, name string }
	names := func(unit, container string) []name {
		return []name{{"unit", unit}, {"container name", container}}
	}
	wanted := map[name][]string{}
	for s, e := range all {
		for _, n := range names(e.Unit, e.ContainerName) {
			wanted[n] = append(wanted[n], s)
		}
	}
	for s, c := range opts.claims {
		for _, n := range names(c.unit, c.container) {
			if !slices.Contains(wanted[n], s) {
				wanted[n] = append(wanted[n], s)
			}
		}
	}
	holds := func(service string, n name) bool {
		c, ok := opts.claims[service]
		return ok && slices.Contains(names(c.unit, c.container), n)
	}
	for s, e := range all {
		p := &problems{}
		if strings.HasPrefix(s, ownPrefix) {
			p.add(e.file, e.lines["service"], "the service %q is reserved, as all that begins with %s: choose another", s, ownPrefix)
		}
		for i, n := range names(e.Unit, e.ContainerName) {
			if n.name == "" {
				continue
			}
			bare := strings.TrimSuffix(strings.TrimPrefix(n.name, "systemd-"), ".container")
			if slices.Contains(opts.reserved, bare) || slices.Contains(opts.reserved, n.name) {
				p.add(e.file, e.lines["unit"], "the %s %q is reserved: choose another", n.kind, n.name)
			} else if strings.HasPrefix(bare, ownPrefix) {
				p.add(e.file, e.lines["unit"], "the %s %q is reserved, as all that begins with %s: choose another", n.kind, n.name, ownPrefix)
			}
			if c, ok := opts.claims[s]; ok && !holds(s, n) {
				p.add(e.file, e.lines["unit"], "the %s is %q, but this service runs as %q: change it back, or retire the service first", n.kind, n.name, names(c.unit, c.container)[i].name)
			}
			others := slices.DeleteFunc(slices.Clone(wanted[n]), func(o string) bool { return o == s })
			if holds(s, n) {
				others = slices.DeleteFunc(others, func(o string) bool { return !holds(o, n) })
			}
			if len(others) > 0 {
				slices.Sort(others)
				p.add(e.file, e.lines["unit"], "the %s %q is also that of service %s: choose another", n.kind, n.name, strings.Join(others, ", "))
			}
		}
		if len(p.errs) > 0 {
			e.Err = errors.Join(e.Err, p.err())
			all[s] = e
		}
	}
}

// The enrollments in force.

// moment is how long a missing or torn file counts as one that is just being replaced.
const moment = 10 * time.Second

// enrollments is the enrollment directory in force. It looks at the files for every question, and
// reads them again only if something changed.
type enrollments struct {
	dir  string
	opts func() enrollOptions // asked for every question, never under mu

	mu    sync.Mutex
	used  enrollOptions       // what was read with
	seen  string              // signature of what was read; "": read again
	read  map[string]enrolled // as last read
	err   error               // why the directory could not be read
	force map[string]*inForce // by service: the last good one
}

type inForce struct {
	good     enrolled
	badSince time.Time // zero: it still stands in the directory
}

// newEnrollments takes the options as a function, since claims change while the server runs.
func newEnrollments(dir string, opts func() enrollOptions) *enrollments {
	return &enrollments{dir: dir, opts: opts, force: map[string]*inForce{}}
}

// get returns the enrollment in force of a service; the error is its Err. errNotFound: its file is
// gone.
func (s *enrollments) get(service string) (enrolled, error) {
	opts := s.opts()
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.judge(service, s.look(opts))
	return e, e.Err
}

// all returns the enrollments in force of every file there is, and of the services that are known.
func (s *enrollments) all(known ...string) map[string]enrolled {
	opts := s.opts()
	s.mu.Lock()
	defer s.mu.Unlock()
	newest := s.look(opts)
	all := map[string]enrolled{}
	for name := range s.read {
		all[name] = s.judge(name, newest)
	}
	for _, name := range known {
		all[name] = s.judge(name, newest)
	}
	return all
}

// look brings read up to date, and returns when the newest change of all files was made.
func (s *enrollments) look(opts enrollOptions) time.Time {
	now := time.Now()
	sig, newest, touched, err := signature(s.dir, opts.quadlets)
	if err == nil && sig == s.seen && reflect.DeepEqual(opts, s.used) {
		return newest
	}
	s.seen, s.used = "", opts
	var all map[string]enrolled
	if err == nil {
		all, err = readEnrollments(s.dir, opts)
	}
	s.read, s.err = all, err
	// A file changed within the same tick of the file system's clock would look unchanged: what is
	// that fresh is read again next time.
	if err == nil && now.Sub(touched) > 100*time.Millisecond {
		s.seen = sig
	}
	return newest
}

func (s *enrollments) judge(service string, newest time.Time) enrolled {
	e, ok := s.read[service]
	switch {
	case ok && e.Err == nil:
		s.force[service] = &inForce{good: e}
		return e
	case ok:
	case s.err != nil:
		e = enrolled{Err: s.err}
		e.Service = service
	default:
		file := filepath.Join(s.dir, service+".json")
		e = enrolled{Err: fmt.Errorf("%s: enrollment file is gone: put it back, or retire the service: %w", file, errNotFound)}
		e.Service = service
	}
	f := s.force[service]
	if f == nil {
		return e
	}
	now := time.Now()
	if f.badSince.IsZero() {
		// Nobody may have looked for long: it cannot be younger than the newest change.
		f.badSince = now
		if s.err == nil && newest.Before(now) {
			f.badSince = newest
		}
	}
	if now.Sub(f.badSince) < moment {
		return f.good
	}
	delete(s.force, service)
	return e
}

// signature sums up the state of all files below the directories without reading them; newest is
// the latest change of a content, touched that of anything.
func signature(dirs ...string) (sig string, newest, touched time.Time, err error) {
	h := sha256.New()
	type inode struct{ dev, ino uint64 }
	visited := map[inode]bool{}
	var walk func(name string) error
	walk = func(name string) error {
		info, err := os.Stat(name) // a link is what it leads to
		if err != nil {
			fmt.Fprintf(h, "%q gone\n", name)
			return err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("stat %s: no inode", name)
		}
		changed, modified := time.Unix(st.Ctim.Unix()), info.ModTime()
		fmt.Fprintf(h, "%q %v %d %d %d %d %d\n", name, info.Mode(), info.Size(), st.Dev, st.Ino, modified.UnixNano(), changed.UnixNano())
		if modified.After(newest) {
			newest = modified
		}
		if changed.After(touched) {
			touched = changed
		}
		id := inode{st.Dev, st.Ino}
		if !info.IsDir() || visited[id] {
			return nil
		}
		visited[id] = true
		entries, err := os.ReadDir(name)
		for _, e := range entries {
			_ = walk(filepath.Join(name, e.Name())) // one that vanished is in the sum as gone
		}
		return err
	}
	for _, dir := range dirs {
		if dir == "" {
			continue
		}
		if err := walk(dir); err != nil {
			return "", newest, touched, fmt.Errorf("reading enrollments: %w", err)
		}
	}
	return hex.EncodeToString(h.Sum(nil)), newest, touched, nil
}

// Checking without a host.

// checkDirectory judges an enrollment directory as the server would, and says so, a line for each
// service or for each thing that is wrong with it.
func checkDirectory(w io.Writer, dir string, opts enrollOptions) bool {
	all, err := readEnrollments(dir, opts)
	if err != nil {
		fmt.Fprintf(w, "problem: %v\n", err)
		return false
	}
	ok := true
	for _, service := range slices.Sorted(maps.Keys(all)) {
		e := all[service]
		if e.Err == nil {
			fmt.Fprintf(w, "%s: ok\n", service)
			continue
		}
		ok = false
		for line := range strings.SplitSeq(e.Err.Error(), "\n") {
			fmt.Fprintf(w, "%s: problem: %s\n", service, line)
		}
	}
	if len(all) == 0 {
		fmt.Fprintf(w, "problem: there is no enrollment in %s\n", dir)
		ok = false
	}
	if opts.quadlets == "" {
		fmt.Fprintln(w, "note: networks and drop-ins were not checked; --quadlets DIR checks them too")
	}
	return ok
}
