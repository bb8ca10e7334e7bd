// enrollment.go reads and judges what infrastructure declares for each service, and renders the unit
// of a revision from it. It only reads: it never changes the host, talks to nothing, and decides
// nothing about a rollout. Whoever runs a rollout uses the enrollment that its revision carries; the
// directory read here is for admission only.
package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
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
	"unicode"
	"unicode/utf8"

	"github.com/containers/podman/v5/pkg/systemd/parser"
)

// enrollment is the operator's declaration for one service (DESIGN section 3).
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
		for i, n := range names(e.Unit, e.ContainerName) {
			if n.name == "" {
				continue
			}
			bare := strings.TrimSuffix(strings.TrimPrefix(n.name, "systemd-"), ".container")
			if slices.Contains(opts.reserved, bare) || slices.Contains(opts.reserved, n.name) {
				p.add(e.file, e.lines["unit"], "the %s %q is reserved: choose another", n.kind, n.name)
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

// The template.

// forbiddenKeys are keys that a template may not have, with what to do instead.
var forbiddenKeys = map[string]map[string]string{
	"Container": {
		"Image":                "Toad writes it: remove the line",
		"Pull":                 "Toad writes it: remove the line",
		"AutoUpdate":           "only Toad changes the image: remove the line",
		"Rootfs":               "Toad deploys images: remove the line",
		"Pod":                  "a pod starts and stops its containers itself: remove the line",
		"StartWithPod":         "a pod starts and stops its containers itself: remove the line",
		"ServiceName":          "the service is named after the unit: remove the line",
		"ContainersConfModule": "it could change where Podman keeps the container: remove the line",
		"CgroupsMode":          "an end is proven by the unit's own control group: remove the line",
	},
	"Service": {
		"Type":            "Quadlet's own is the only one that tells when the container runs: remove the line",
		"RemainAfterExit": "a dead container would count as running: remove the line",
		"KillMode":        "Quadlet's own is the one whose end can be proven: remove the line",
		"Delegate":        "Quadlet's own is the one whose end can be proven: remove the line",
		"ExecStart":       "Quadlet writes it: remove the line",
	},
	"Unit": {
		"RefuseManualStart": "Toad could not start the service: remove the line",
		"RefuseManualStop":  "Toad could not stop the service: remove the line",
	},
	"Install": {
		"Alias":           "a service has one name: remove the line",
		"Also":            "a service is installed alone: remove the line",
		"DefaultInstance": "a service has one instance: remove the line",
		"UpheldBy":        "systemd would start the service again while Toad stops it: use WantedBy=",
	},
}

// forbiddenFlags are flags that PodmanArgs= and GlobalArgs= may not have.
var forbiddenFlags = map[string]string{
	"name": "use ContainerName=", "replace": "Quadlet sets it", "rm": "Quadlet sets it", "rmi": "Toad keeps the images",
	"restart": "use Restart= in [Service]", "pull": "Toad sets it", "detach": "Quadlet sets it", "cidfile": "Quadlet sets it",
	"cgroups": "an end is proven by the unit's own control group", "cgroup-parent": "an end is proven by the unit's own control group",
	"sdnotify": "use Notify=", "stop-timeout": "use StopTimeout=",
	"volume": "use Volume=", "mount": "use Mount=", "volumes-from": "use Volume=",
	"network": "use Network=", "net": "use Network=", "label": "use Label=", "label-file": "use Label=",
	"pod": "a pod starts and stops its containers itself", "pod-id-file": "a pod starts and stops its containers itself",
	"rootfs": "Toad deploys images", "root": elsewhere, "runroot": elsewhere, "imagestore": elsewhere, "storage-driver": elsewhere,
	"storage-opt": elsewhere, "transient-store": elsewhere, "tmpdir": elsewhere, "volumepath": elsewhere, "namespace": elsewhere,
	"db-backend": elsewhere, "network-config-dir": elsewhere, "module": elsewhere, "config": elsewhere,
	"remote": elsewhere, "url": elsewhere, "host": elsewhere, "connection": elsewhere, "identity": elsewhere,
	"cgroup-manager": "an end is proven by the unit's own control group", "events-backend": "restarts are counted by Podman's events",
}

const elsewhere = "Podman's API would not see the container"

// boolFlags of podman run take no word after them.
var boolFlags = []string{"detach", "env-host", "http-proxy", "init", "interactive", "no-healthcheck", "no-hosts",
	"no-hostname", "oom-kill-disable", "passwd", "privileged", "publish-all", "quiet", "read-only",
	"read-only-tmpfs", "replace", "rm", "rmi", "rootfs", "sig-proxy", "tls-verify", "tty", "unsetenv-all",
	"disable-content-trust", "help", "remote", "noout", "trace", "syslog", "transient-store", "debug"}

var shortFlags = map[byte]string{'v': "volume", 'l': "label", 'd': "detach", 'c': "connection", 'r': "remote", 'H': "host",
	'i': "interactive", 't': "tty", 'q': "quiet", 'P': "publish-all", 'D': "debug"}

// checkTemplate judges the template, alone and against the declaration, and sets ContainerName and
// NetworkName.
func (e *enrolled) checkTemplate(p *problems, file string, tree *quadletTree, opts enrollOptions) {
	bad := func(line int, format string, args ...any) { p.add(file, line, format, args...) }
	u, err := scanUnit(e.Template)
	if err != nil {
		p.errs = append(p.errs, at(file, err))
		return
	}
	if u.open {
		bad(u.last, "the file ends inside a continued line: remove the backslash")
		return
	}
	if !slices.ContainsFunc(u.lines, func(l unitLine) bool { return l.group == "Container" }) {
		bad(1, "there is no [Container] section")
	}
	for _, l := range u.lines {
		switch {
		case l.key == "" && !acceptedGroup(l.group):
			bad(l.no, "section [%s] has no place in a service's template: remove it", l.group)
		case forbiddenKeys[l.group][l.key] != "":
			bad(l.no, "%s= is not allowed: %s", l.key, forbiddenKeys[l.group][l.key])
		case l.group == "Container" && l.key == "Label":
			for _, w := range words(l.value) {
				if k, _, _ := strings.Cut(w, "="); strings.HasPrefix(k, "toad.") || k == "io.containers.autoupdate" {
					bad(l.no, "Label=%s is not allowed: only Toad changes or marks the container: remove it", k)
				}
			}
		}
	}
	for _, key := range []string{"GlobalArgs", "PodmanArgs"} {
		checkArgs(u.values("Container", key), key, bad)
	}
	e.checkContainerName(u, bad)
	e.checkStopTimes(u, bad)
	e.checkMounts(u, opts, bad)
	e.checkNetworks(u, file, tree, p)
	checkPorts(u, bad)
	for _, key := range []string{"Environment", "Label", "Annotation", "Exec", "Mount", "Secret", "PodmanArgs", "GlobalArgs"} {
		for _, l := range u.values("Container", key) {
			if openQuote(l.value) { // the generator drops what it cannot split, and says nothing
				bad(l.no, "%s= has a quote that is not closed", key)
			}
		}
	}
	if tree != nil {
		for _, d := range tree.dropins(e.Unit) {
			p.add(d, 0, "this drop-in would change %s behind Toad: put its lines into the template", e.Unit)
		}
	}
}

func acceptedGroup(name string) bool {
	switch name {
	case "Unit", "Container", "Service", "Install", "Quadlet":
		return true
	case "X-Container", "X-Quadlet": // Quadlet's own names for what it was given
		return false
	}
	return strings.HasPrefix(name, "X-")
}

// checkArgs judges words that reach podman as they are, so that none of them undoes what Quadlet,
// Toad or another rule of the template says.
func checkArgs(args []unitLine, key string, bad func(line int, format string, args ...any)) {
	value := false // the next word belongs to the flag before it
	for _, l := range args {
		ws := words(l.value)
		if len(ws) == 0 {
			bad(l.no, "%s= cannot be split into words: look at its quotes and backslashes", key)
		}
		for _, w := range ws {
			switch {
			case strings.HasPrefix(w, "$") && !strings.HasPrefix(w, "$$"):
				bad(l.no, "%s in %s= is not allowed: systemd would put other words in its place", w, key)
				value = false
			case w == "--":
				bad(l.no, "-- in %s= is not allowed: what follows would be taken for the image", key)
				return
			case strings.HasPrefix(w, "--"):
				flag, _, has := strings.Cut(w[2:], "=")
				if why := forbiddenFlags[flag]; why != "" {
					bad(l.no, "--%s in %s= is not allowed: %s", flag, key, why)
				} else if strings.Contains(flag, "$") {
					bad(l.no, "%s in %s= is not allowed: systemd would put another flag in its place", w, key)
				}
				value = !has && !slices.Contains(boolFlags, flag)
			case len(w) > 1 && w[0] == '-':
				value = false
				for i := 1; i < len(w); i++ { // -itv/x:/y is -i -t -v /x:/y
					long := shortFlags[w[i]]
					if key == "PodmanArgs" && strings.IndexByte("crH", w[i]) >= 0 {
						long = "" // podman run's own -c and the like
					}
					if why := forbiddenFlags[long]; why != "" {
						bad(l.no, "-%c in %s= is not allowed: %s", w[i], key, why)
					}
					if !slices.Contains(boolFlags, long) {
						value = i == len(w)-1
						break
					}
				}
			case value:
				value = false
			default:
				bad(l.no, "%q in %s= belongs to no flag: podman would take it for the image", w, key)
			}
		}
	}
}

// openQuote tells that a quote is opened and never closed, as systemd and the generator read values.
func openQuote(value string) bool {
	var quote rune
	escaped := false
	for _, c := range value {
		switch {
		case escaped:
			escaped = false
		case c == '\\':
			escaped = true
		case quote == 0 && (c == '"' || c == '\''):
			quote = c
		case c == quote:
			quote = 0
		}
	}
	return quote != 0
}

// checkPorts judges PublishPort=, which neither the generator nor systemd does: Podman would refuse it
// only after the old instance was stopped. What systemd puts in place of $ and % is not known here.
func checkPorts(u unitText, bad func(line int, format string, args ...any)) {
	for _, l := range u.values("Container", "PublishPort") {
		if strings.ContainsAny(l.value, "$%") {
			continue
		}
		if !isPublishedPort(strings.TrimSpace(l.value)) {
			bad(l.no, "PublishPort=%s is none: want [[IP:][HOSTPORT]:]PORT[/PROTOCOL], or ranges of one length", l.value)
		}
	}
}

func isPublishedPort(s string) bool {
	ports, protocol, has := strings.Cut(s, "/")
	if has && !slices.Contains([]string{"tcp", "udp", "sctp"}, strings.ToLower(protocol)) {
		return false
	}
	rest, inside := "", ports
	mapped := false
	if i := strings.LastIndexByte(ports, ':'); i >= 0 {
		rest, inside, mapped = ports[:i], ports[i+1:], true
	}
	n, ok := portRange(inside)
	if !ok || !mapped {
		return ok
	}
	outside, address := rest, ""
	if i := strings.LastIndexByte(rest, ':'); i >= 0 && !strings.HasSuffix(rest, "]") {
		address, outside = strings.Trim(rest[:i], "[]"), rest[i+1:]
		if _, err := netip.ParseAddr(address); address != "" && err != nil {
			return false
		}
	}
	if outside == "" {
		return true
	}
	m, ok := portRange(outside)
	return ok && (m == n || n == 1) // one port inside, any of several outside
}

// portRange returns how many ports "80" or "80-90" are.
func portRange(s string) (int, bool) {
	first, last, isRange := strings.Cut(s, "-")
	a, err := strconv.ParseUint(first, 10, 16)
	if err != nil || a == 0 {
		return 0, false
	}
	if !isRange {
		return 1, true
	}
	b, err := strconv.ParseUint(last, 10, 16)
	return int(b) - int(a) + 1, err == nil && b >= a
}

func (e *enrolled) checkContainerName(u unitText, bad func(line int, format string, args ...any)) {
	e.ContainerName = "systemd-" + strings.TrimSuffix(e.Unit, ".container")
	l, ok := u.lastOf("Container", "ContainerName")
	name := unquoted(l.value)
	if !ok || name == "" {
		return
	}
	e.ContainerName = name
	switch {
	case strings.Contains(name, "%"):
		bad(l.no, "ContainerName=%s has a specifier: write the name out", name)
	case !podmanNameRE.MatchString(name):
		bad(l.no, "ContainerName=%s is no container name", name)
	default:
		return
	}
	e.ContainerName = ""
}

// checkStopTimes sees that podman gives up before systemd does, and systemd before Toad: its stop,
// SIGTERM and SIGKILL take one TimeoutStopSec each.
func (e *enrolled) checkStopTimes(u unitText, bad func(line int, format string, args ...any)) {
	podman, systemd := 10*time.Second, 90*time.Second
	line := 1
	if l, ok := u.lastOf("Container", "StopTimeout"); ok && unquoted(l.value) != "" {
		line = l.no
		n, err := strconv.ParseUint(unquoted(l.value), 10, 31)
		if err != nil {
			bad(l.no, "StopTimeout=%s is no number of seconds", l.value)
			return
		}
		podman = time.Duration(n) * time.Second
	}
	for _, l := range u.lines {
		if l.group != "Service" || l.key != "TimeoutStopSec" && l.key != "TimeoutSec" {
			continue
		}
		line = l.no
		d, err := parseTimeSpan(l.value)
		if err != nil {
			bad(l.no, "%s=%s: %v", l.key, l.value, err)
			return
		}
		systemd = d
	}
	if podman >= systemd {
		bad(line, "StopTimeout (%v) must be below TimeoutStopSec (%v): set both, unset is 10s and 90s", podman, systemd)
	}
	if deadline := time.Duration(e.StopDeadline); deadline > 0 && systemd > deadline/3 {
		bad(line, "three times TimeoutStopSec (%v) must fit into the stop_deadline of %v: set both, unset is 90s", systemd, e.StopDeadline)
	}
}

var spanUnits = map[string]time.Duration{
	"us": time.Microsecond, "usec": time.Microsecond, "µs": time.Microsecond, "μs": time.Microsecond,
	"ms": time.Millisecond, "msec": time.Millisecond,
	"": time.Second, "s": time.Second, "sec": time.Second, "second": time.Second, "seconds": time.Second,
	"m": time.Minute, "min": time.Minute, "minute": time.Minute, "minutes": time.Minute,
	"h": time.Hour, "hr": time.Hour, "hour": time.Hour, "hours": time.Hour,
	"d": 24 * time.Hour, "day": 24 * time.Hour, "days": 24 * time.Hour,
	"w": 7 * 24 * time.Hour, "week": 7 * 24 * time.Hour, "weeks": 7 * 24 * time.Hour,
}

// parseTimeSpan reads a systemd time span ("1min 30s", "90"). Endless ones are an error here, and so
// are months and years: nothing that long can be a stop's timeout.
func parseTimeSpan(s string) (time.Duration, error) {
	text := strings.TrimSpace(s)
	endless := errors.New("an endless timeout is not allowed: set a time")
	if text == "infinity" {
		return 0, endless
	}
	var sum float64
	for rest := text; rest != ""; rest = strings.TrimLeft(rest, " \t") {
		n := strings.IndexFunc(rest, func(c rune) bool { return c != '.' && (c < '0' || c > '9') })
		if n < 0 {
			n = len(rest)
		}
		v, err := strconv.ParseFloat(rest[:n], 64)
		if err != nil {
			return 0, errors.New(`want a time span such as "10s" or "1min 30s"`)
		}
		rest = strings.TrimLeft(rest[n:], " \t")
		n = strings.IndexFunc(rest, func(c rune) bool { return !unicode.IsLetter(c) && c != 'µ' })
		if n < 0 {
			n = len(rest)
		}
		unit, ok := spanUnits[rest[:n]]
		if !ok {
			return 0, fmt.Errorf(`%q is no unit of time: want a time span such as "10s" or "1min 30s"`, rest[:n])
		}
		sum += v * float64(unit)
		rest = rest[n:]
	}
	if text != "" && sum < float64(time.Microsecond) {
		return 0, endless // systemd takes 0 for it
	}
	if text == "" || sum > float64(math.MaxInt64/4) {
		return 0, errors.New(`want a time span such as "10s" or "1min 30s"`)
	}
	return time.Duration(sum), nil
}

// Mounts.

type unitMount struct {
	no             int
	key            string
	kind           string // Podman's mount type; Volume= is "volume"
	source, target string // source "": none
	bad            string // why it cannot be read; nothing else is set then
}

// hasSource tells whether mounts of this kind have a source that the generator resolves.
func (m unitMount) hasSource() bool {
	return slices.Contains([]string{"volume", "bind", "glob", "image", "artifact"}, m.kind)
}

// mounts lists what Volume=, Mount= and Tmpfs= mount, as far as the generator would take it.
func (u unitText) mounts() (all []unitMount) {
	for _, l := range u.values("Container", "Volume") {
		m := unitMount{no: l.no, key: "Volume", kind: "volume"}
		if parts := strings.SplitN(l.value, ":", 3); len(parts) > 1 {
			m.source, m.target = parts[0], parts[1]
		} else {
			m.target = parts[0]
		}
		all = append(all, m)
	}
	for _, l := range u.values("Container", "Mount") {
		for _, w := range words(l.value) {
			records, err := csv.NewReader(strings.NewReader(w)).ReadAll()
			if err != nil || len(records) != 1 {
				all = append(all, unitMount{no: l.no, bad: fmt.Sprintf("Mount=%s cannot be read: want type=…,source=…,destination=…", w)})
				continue
			}
			m := unitMount{no: l.no, key: "Mount", kind: "volume"}
			for _, field := range records[0] {
				switch k, v, _ := strings.Cut(field, "="); k {
				case "type":
					m.kind = v
				case "source", "src":
					m.source = v
				case "destination", "dst", "target":
					m.target = v
				}
			}
			if m.source == "" && m.hasSource() {
				// The generator of Podman 5.4 dies of it, and with it every Quadlet of the host.
				m = unitMount{no: l.no, bad: fmt.Sprintf("Mount= of type %s names no source: add source=…", m.kind)}
			}
			all = append(all, m)
		}
	}
	for _, l := range u.values("Container", "Tmpfs") {
		target, _, _ := strings.Cut(l.value, ":")
		all = append(all, unitMount{no: l.no, key: "Tmpfs", kind: "tmpfs", target: target})
	}
	return all
}

// checkMounts refuses every mount that reaches what only Toad and the user's own services may touch.
func (e *enrolled) checkMounts(u unitText, opts enrollOptions, bad func(line int, format string, args ...any)) {
	guarded := opts.forbiddenPaths
	if len(guarded) == 0 {
		guarded = []string{usualData}
	}
	home := cmp.Or(opts.home, homeOf(guarded[0]))
	for _, m := range u.mounts() {
		if m.bad != "" {
			bad(m.no, "%s", m.bad)
			continue
		}
		if m.source == "" || !m.hasSource() || m.kind == "image" || m.kind == "artifact" {
			continue // nothing of the host
		}
		source, ok := expand(m.source, e.Unit, home)
		switch {
		case !ok || strings.Contains(source, "$"):
			bad(m.no, "%s=%s: where this leads cannot be known here: write the path out", m.key, m.source)
			continue
		case strings.HasPrefix(source, "/"):
		case strings.HasPrefix(source, "."):
			bad(m.no, "%s=%s would lie in Toad's own Quadlet directory: use an absolute path", m.key, m.source)
			continue
		case m.kind != "volume" || !podmanNameRE.MatchString(source):
			bad(m.no, "%s=%s is neither an absolute path nor the name of a volume", m.key, m.source)
			continue
		default:
			continue // a named volume
		}
		at := path.Clean(source)
		if i := strings.IndexAny(at, "*?[\\"); m.kind == "glob" && i >= 0 {
			at = path.Dir(at[:i] + "x") // whatever the pattern finds lies in there
		}
		if at == "/var/run" || strings.HasPrefix(at, "/var/run/") {
			at = strings.TrimPrefix(at, "/var")
		}
		for _, g := range append([]string{"/run/user"}, guarded...) {
			if g = path.Clean(g); within(at, g) || within(g, at) {
				bad(m.no, "%s=%s reaches %s, which is not for services: use a path elsewhere or a named volume", m.key, m.source, g)
				break
			}
		}
	}
}

// within tells whether p is dir or lies in it.
func within(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

// homeOf derives the service user's home from where its data directory is.
func homeOf(data string) string {
	if home, ok := strings.CutSuffix(path.Clean(data), "/.local/share/toad"); ok {
		return cmp.Or(home, "/")
	}
	if parts := strings.SplitN(path.Clean(data), "/", 4); len(parts) > 3 && parts[1] == "home" {
		return "/home/" + parts[2]
	}
	return path.Dir(path.Clean(data))
}

// expand puts in place of systemd's specifiers what they mean for a unit of the user manager; false
// if there is one that it cannot know.
func expand(s, unit, home string) (string, bool) {
	stem := strings.TrimSuffix(unit, ".container")
	known := map[byte]string{
		'%': "%", 'h': home, 't': "/run/user/%U", 'u': path.Base(home), 'U': "%U",
		'S': home + "/.local/state", 'L': home + "/.local/state/log", 'C': home + "/.cache",
		'E': home + "/.config", 'D': home + "/.local/share", 'T': "/tmp", 'V': "/var/tmp",
		'n': stem + ".service", 'N': stem, 'p': stem,
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b.WriteByte(s[i])
			continue
		}
		i++
		if i == len(s) {
			return s, false
		}
		v, ok := known[s[i]]
		if !ok {
			return s, false
		}
		b.WriteString(v)
	}
	return b.String(), true
}

// coveredVolumes lists the container's paths that a unit mounts something on: a volume that an
// image declares there is none that Podman would make anew at every start. "*" stands for all.
func coveredVolumes(unit []byte) []string {
	u, err := scanUnit(unit)
	if err != nil {
		return nil
	}
	var covered []string
	for _, m := range u.mounts() {
		if t := path.Clean(m.target); path.IsAbs(t) {
			covered = append(covered, t)
		}
	}
	for _, v := range u.flag("image-volume") {
		if v == "ignore" || v == "tmpfs" {
			covered = append(covered, "*")
		}
	}
	for _, v := range u.flag("tmpfs") {
		t, _, _ := strings.Cut(v, ":")
		covered = append(covered, path.Clean(t))
	}
	slices.Sort(covered)
	return slices.Compact(covered)
}

// uncovered returns which volumes of an image nothing is mounted on. Podman goes by the exact path: a
// mount on a parent covers nothing.
func uncovered(image, covered []string) []string {
	var left []string
	for _, v := range image {
		v = path.Clean("/" + v)
		if !slices.Contains(covered, v) && !slices.Contains(covered, "*") {
			left = append(left, v)
		}
	}
	slices.Sort(left)
	return slices.Compact(left)
}

// Networks, drop-ins, and what else lies in the Quadlet directory.

func (e *enrolled) checkNetworks(u unitText, file string, tree *quadletTree, p *problems) {
	joined := false
	want := e.Readiness.Network + ".network"
	for _, l := range u.values("Container", "Network") {
		quadlet, _, _ := strings.Cut(l.value, ":")
		name, ok := strings.CutSuffix(quadlet, ".network")
		if !ok || !podmanNameRE.MatchString(name) {
			p.add(file, l.no, "Network=%s is no network of the host's Quadlets, and a prune takes others away: use Network=NAME.network", l.value)
			continue
		}
		if name == "toad" {
			p.add(file, l.no, "Network=%s is Toad's own, and no service's: use another", l.value)
			continue
		}
		joined = joined || quadlet == want
		if tree == nil {
			continue
		}
		podman, err := tree.networkName(quadlet)
		if err != nil {
			p.add(file, l.no, "Network=%s: %w", l.value, err)
			continue
		}
		own, err := tree.networkName("toad.network")
		if err == nil && podman == own || podman == "toad" || podman == "systemd-toad" {
			p.add(file, l.no, "Network=%s is Toad's own (%s), and no service's: use another", l.value, podman)
			continue
		}
		if quadlet == want {
			e.NetworkName = podman
		}
	}
	if !joined && isNetwork(e.Readiness.Network) {
		p.add(e.file, e.lines["readiness.network"], "readiness.network: the template %s does not join it: add Network=%s to its [Container] section", filepath.Base(file), want)
	}
}

// quadletTree is the Quadlet directory as the generator walks it: every directory below it but
// drop-in directories, each before its own sub-directories.
type quadletTree struct{ dirs []string }

func readQuadletTree(root string) (*quadletTree, error) {
	t := &quadletTree{}
	visited := map[string]bool{}
	var walk func(dir string) error
	walk = func(dir string) error {
		real, err := filepath.EvalSymlinks(dir)
		if err != nil || visited[real] || strings.HasSuffix(real, ".d") {
			return err
		}
		info, err := os.Stat(real)
		if err != nil || !info.IsDir() {
			return err
		}
		visited[real] = true
		t.dirs = append(t.dirs, dir)
		entries, err := os.ReadDir(dir)
		for _, e := range entries {
			// What vanished meanwhile or leads nowhere is nothing to the generator either.
			_ = walk(filepath.Join(dir, e.Name()))
		}
		return err
	}
	return t, walk(root)
}

// file returns the path of a Quadlet; of several of that name the first counts.
func (t *quadletTree) file(name string) (string, bool) {
	for _, d := range t.dirs {
		f := filepath.Join(d, name)
		if info, err := os.Stat(f); err == nil && info.Mode().IsRegular() {
			return f, true
		}
	}
	return "", false
}

// dropins returns every file that the generator would merge into the Quadlet of that name: *.conf
// in NAME.d, PREFIX-.container.d and container.d of any directory.
func (t *quadletTree) dropins(name string) []string {
	u := parser.NewUnitFile()
	u.Filename = name
	var found []string
	for _, d := range t.dirs {
		for _, sub := range u.GetUnitDropinPaths() {
			entries, _ := os.ReadDir(filepath.Join(d, sub))
			for _, e := range entries {
				if filepath.Ext(e.Name()) == ".conf" {
					found = append(found, filepath.Join(d, sub, e.Name()))
				}
			}
		}
	}
	return found
}

// resource returns Podman's own name of what a Quadlet makes.
func (t *quadletTree) resource(quadlet, group, key string) (string, error) {
	f, ok := t.file(quadlet)
	if !ok {
		return "", fmt.Errorf("%s is not in the Quadlet directory: add it there first", quadlet)
	}
	text, err := readBounded(f)
	if err != nil {
		return "", err
	}
	u, err := scanUnit(text)
	if err != nil {
		return "", at(f, err)
	}
	for _, d := range t.dropins(quadlet) {
		if text, err := readBounded(d); err == nil && bytes.Contains(text, []byte(key)) {
			return "", fmt.Errorf("%s sets %s=: set it in %s itself", d, key, quadlet)
		}
	}
	l, _ := u.lastOf(group, key)
	name := unquoted(l.value)
	if name == "" {
		name = "systemd-" + strings.TrimSuffix(quadlet, filepath.Ext(quadlet))
	}
	if !podmanNameRE.MatchString(name) {
		return "", fmt.Errorf("%s:%d: %s=%s must be a plain name", f, l.no, key, name)
	}
	return name, nil
}

func (t *quadletTree) networkName(quadlet string) (string, error) {
	return t.resource(quadlet, "Network", "NetworkName")
}

// Reading a unit's text.

// unitLine is one line of a unit as the generator sees it: continued lines are one. A section's own
// header is a line without key.
type unitLine struct {
	no, start         int // where its first line is: number and byte offset
	group, key, value string
}

type unitText struct {
	lines []unitLine
	open  bool // the text ends inside a continued line
	last  int  // its last line
}

// lineError is what the generator could not load.
type lineError struct {
	no   int
	text string
}

func (e *lineError) Error() string { return fmt.Sprintf("line %d: %s", e.no, e.text) }

// at puts the file before an error of scanUnit.
func at(file string, err error) error {
	if l := new(lineError); errors.As(err, &l) {
		return fmt.Errorf("%s:%d: %s", file, l.no, l.text)
	}
	return fmt.Errorf("%s: %w", file, err)
}

// scanUnit reads a unit file line by line exactly as the generator does. What it adds to the
// generator's own parser are line numbers; its errors name the line.
func scanUnit(text []byte) (unitText, error) {
	var u unitText
	bad := func(no int, format string, args ...any) (unitText, error) {
		return u, &lineError{no, fmt.Sprintf(format, args...)}
	}
	if !utf8.Valid(text) {
		return u, errors.New("this is not UTF-8 text")
	}
	group, grouped := "", false
	rest, restNo, restStart := "", 0, 0
	offset := 0
	all := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	for i, raw := range all {
		no, start := i+1, offset
		offset += len(raw) + 1
		if strings.ContainsFunc(raw, func(c rune) bool { return unicode.IsControl(c) && c != '\t' && c != '\r' }) {
			return bad(no, "a control character")
		}
		line := strings.TrimSpace(raw)
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		u.last = no
		line, u.open = strings.CutSuffix(line, `\`)
		if u.open && i < len(all)-1 {
			if rest == "" {
				restNo, restStart = no, start
			}
			rest += line
			continue
		}
		if rest != "" {
			line, no, start, rest = rest+line, restNo, restStart, ""
		}
		if line == "" || line[0] == '#' || line[0] == ';' {
			continue
		}
		if line[0] == '[' {
			if end := strings.IndexByte(line, ']'); end > 0 && strings.Trim(line[end+1:], " \t") == "" {
				if group = line[1:end]; group == "" || strings.ContainsFunc(group, unicode.IsControl) || strings.Contains(group, "[") {
					return bad(no, "[%s] is no section", group)
				}
				grouped = true
				u.lines = append(u.lines, unitLine{no: no, start: start, group: group})
				continue
			}
		}
		key, value, ok := strings.Cut(line, "=")
		if !ok || key == "" {
			return bad(no, "%q is neither KEY=VALUE, nor a section, nor a comment", line)
		}
		if !grouped {
			return bad(no, "there is no section before it")
		}
		for key != "" && unicode.IsSpace(rune(key[len(key)-1])) {
			key = key[:len(key)-1]
		}
		for value != "" && unicode.IsSpace(rune(value[0])) {
			value = value[1:]
		}
		if key == "" || key[0] == ' ' {
			return bad(no, "there is no key")
		}
		u.lines = append(u.lines, unitLine{no: no, start: start, group: group, key: key, value: value})
	}
	u.open = u.open || rest != ""
	// The last word is the generator's own parser's.
	if err := parser.NewUnitFile().Parse(string(text)); err != nil {
		return u, err
	}
	return u, nil
}

// values returns a key's lines in force: an empty one takes back those before it.
func (u unitText) values(group, key string) []unitLine {
	var all []unitLine
	for _, l := range u.lines {
		if l.group != group || l.key != key {
			continue
		}
		if l.value == "" {
			all = nil
		} else {
			all = append(all, l)
		}
	}
	return all
}

func (u unitText) lastOf(group, key string) (last unitLine, ok bool) {
	for _, l := range u.lines {
		if l.group == group && l.key == key {
			last, ok = l, true
		}
	}
	return last, ok
}

// flag returns the values of one flag in PodmanArgs=.
func (u unitText) flag(name string) (all []string) {
	next := false
	for _, l := range u.values("Container", "PodmanArgs") {
		for _, w := range words(l.value) {
			if next {
				all = append(all, w)
			}
			next = w == "--"+name
			if v, ok := strings.CutPrefix(w, "--"+name+"="); ok {
				all = append(all, v)
			}
		}
	}
	return all
}

// words splits a value as the generator does for command lines, labels, mounts and secrets.
func words(value string) []string {
	f := parser.NewUnitFile()
	f.Add("x", "x", value)
	return f.LookupAllArgs("x", "x")
}

// unquoted is how the generator reads a key of one value.
func unquoted(value string) string {
	return strings.Trim(strings.TrimRightFunc(value, unicode.IsSpace), `"`)
}

// Rendering.

// unitIdentity says whose a unit is: it is the first line of each unit that Toad writes.
type unitIdentity struct {
	DataID, Service string
	Generation      int64
	Operation       string
	Image           string // repository@sha256:…; not part of the line
}

var markerRE = regexp.MustCompile(`^# toad data=(\S+) service=(\S+) generation=([0-9]+) operation=(\S+)$`)

// renderUnit returns a revision's unit in its promoted form. What Toad adds comes last: the
// generator merges sections of one name, the last value of a key wins, and an empty Label= of the
// template can take nothing back.
func renderUnit(e enrolled, r unitIdentity) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# toad data=%s service=%s generation=%d operation=%s\n", r.DataID, r.Service, r.Generation, r.Operation)
	b.WriteString("# Written by Toad from the enrolled template; changes are lost.\n\n")
	b.Write(e.Template)
	if !bytes.HasSuffix(e.Template, []byte("\n")) {
		b.WriteByte('\n')
	}
	// The comment stands inside the section: before it, it could be the end of an [Install].
	fmt.Fprintf(&b, "\n[Container]\n# Added by Toad.\nImage=%s\nPull=missing\n", r.Image)
	fmt.Fprintf(&b, "Label=toad.service=%s\nLabel=toad.generation=%d\nLabel=toad.operation=%s\n", r.Service, r.Generation, r.Operation)
	return b.Bytes()
}

// candidateForm returns the same unit less its [Install] sections: nothing starts it at a boot.
func candidateForm(promoted []byte) []byte {
	u, err := scanUnit(promoted)
	if err != nil {
		return promoted // never written: checkUnitText refuses it
	}
	var b bytes.Buffer
	from := 0 // what is before it is dealt with
	installing := false
	for _, l := range u.lines {
		if l.key != "" {
			continue
		}
		if !installing {
			b.Write(promoted[from:l.start])
		}
		from, installing = l.start, l.group == "Install"
	}
	if !installing {
		b.Write(promoted[from:])
	}
	return b.Bytes()
}

// parseMarker reads whose a unit is; false if Toad did not write it.
func parseMarker(unit []byte) (unitIdentity, bool) {
	line, _, _ := bytes.Cut(unit, []byte("\n"))
	m := markerRE.FindSubmatch(line)
	if m == nil {
		return unitIdentity{}, false
	}
	generation, err := strconv.ParseInt(string(m[3]), 10, 64)
	return unitIdentity{DataID: string(m[1]), Service: string(m[2]), Generation: generation, Operation: string(m[4])}, err == nil
}

// serviceName returns the systemd service that the generator makes of a unit.
func serviceName(unit string) string { return strings.TrimSuffix(unit, ".container") + ".service" }

// installTargets returns the units that a unit's own [Install] makes start it.
func installTargets(unit []byte) []string {
	u := parser.NewUnitFile()
	if u.Parse(string(unit)) != nil {
		return nil
	}
	return append(u.LookupAllStrv("Install", "WantedBy"), u.LookupAllStrv("Install", "RequiredBy")...)
}

// checkUnitText judges a unit just before it is written: the generator must be able to load it, or
// it would take every unit of its directory down with it, and it must be one that Toad rendered.
func checkUnitText(unit []byte) error {
	u, err := scanUnit(unit)
	if err != nil {
		return fmt.Errorf("unit text: %w", err)
	}
	if u.open {
		return fmt.Errorf("unit text: line %d: the text ends inside a continued line", u.last)
	}
	if _, ok := parseMarker(unit); !ok {
		return errors.New("unit text: its first line is not Toad's marker")
	}
	if l, _ := u.lastOf("Container", "Image"); !strings.Contains(l.value, "@sha256:") {
		return errors.New("unit text: [Container] has no Image= by digest")
	}
	for _, m := range u.mounts() {
		if m.bad != "" {
			return fmt.Errorf("unit text: line %d: %s", m.no, m.bad)
		}
	}
	return nil
}

// referenced lists what a unit needs of Podman, by Podman's own names. A Quadlet that is not there
// any more keeps its file's name, which Podman does not know.
func referenced(unit []byte, quadlets string) (networks, secrets, volumes []string) {
	u, err := scanUnit(unit)
	if err != nil {
		return nil, nil, nil
	}
	tree, err := readQuadletTree(quadlets)
	if err != nil {
		tree = &quadletTree{}
	}
	named := func(quadlet, group, key string) string {
		if name, err := tree.resource(quadlet, group, key); err == nil {
			return name
		}
		return quadlet
	}
	for _, l := range u.values("Container", "Network") {
		if name, _, _ := strings.Cut(l.value, ":"); strings.HasSuffix(name, ".network") {
			networks = append(networks, named(name, "Network", "NetworkName"))
		}
	}
	refs := u.flag("secret")
	for _, l := range u.values("Container", "Secret") {
		refs = append(refs, words(l.value)...)
	}
	for _, r := range refs {
		if name, _, _ := strings.Cut(r, ","); !strings.ContainsAny(name, "%$") {
			secrets = append(secrets, name)
		}
	}
	for _, m := range u.mounts() {
		if m.kind != "volume" || m.source == "" || strings.ContainsAny(m.source, "/%$") || m.source[0] == '.' {
			continue // a path, or a name that only systemd knows
		}
		if strings.HasSuffix(m.source, ".volume") {
			m.source = named(m.source, "Volume", "VolumeName")
		}
		volumes = append(volumes, m.source)
	}
	for _, list := range []*[]string{&networks, &secrets, &volumes} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	return networks, secrets, volumes
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

// all returns the enrollments in force of every file there is and of every service with a revision.
func (s *enrollments) all() map[string]enrolled {
	opts := s.opts()
	s.mu.Lock()
	defer s.mu.Unlock()
	newest := s.look(opts)
	all := map[string]enrolled{}
	for name := range s.read {
		all[name] = s.judge(name, newest)
	}
	for name := range opts.claims {
		all[name] = s.judge(name, newest)
	}
	for _, name := range slices.Collect(maps.Keys(s.force)) {
		if e := s.judge(name, newest); e.Err == nil {
			all[name] = e
		}
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
