// template.go is the text of a unit: what an enrolled template may say, how a revision's unit is rendered
// from it, and what is read out of either. It changes nothing.
package main

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/containers/podman/v5/pkg/systemd/parser"
)

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
		if within(at, "/proc") || within(at, "/dev/fd") { // some of it leads anywhere
			bad(m.no, "%s=%s: where this leads depends on who follows it: use the path itself", m.key, m.source)
			continue
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

// scanUnit reads a unit file line by line exactly as the generator does, and refuses control characters.
// What it adds to the generator's own parser are line numbers; its errors name the line.
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
		// systemd reads what the generator makes of it, and to it a carriage return ends a line as well.
		if strings.HasSuffix(raw, "\r") {
			return bad(no, "the line ends in a carriage return: convert the file to Unix line ends")
		}
		if strings.ContainsFunc(raw, func(c rune) bool { return unicode.IsControl(c) && c != '\t' }) {
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
