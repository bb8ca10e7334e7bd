// web.go is the read-only page: every service at a glance, and one service with its operations. What it
// shows is what any token of the service may read, and what was last seen of the unit and the container.
// Nothing can be changed through it, and it asks neither the host nor the disk: a service that was enrolled
// within lookInterval is not there yet.
package main

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"math"
	"mime"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// What is kept in memory of earlier operations for the page.
const (
	maxRecent = 10  // operations before the one under way or last ended
	maxShown  = 200 // lines of each log, the last ones
)

// webPage is what a page shows, and the same is served as JSON.
type webPage struct {
	Host     string       `json:"host"` // as the reader named it
	Self     string       `json:"self"` // where the same is as JSON
	Version  string       `json:"version"`
	At       wireTime     `json:"at"`
	Services []webService `json:"services"`
}

// webService is a service as any of its tokens may read it, with what was last seen of its instance.
type webService struct {
	wireService
	Known      bool           `json:"known"`     // its records were read: without them what is missing is not known
	Untouched  bool           `json:"untouched"` // the rollout under way has not begun to stop what runs
	Status     webStatus      `json:"status"`
	Unit       *webUnit       `json:"unit"`      // null: not looked at yet
	Container  *webContainer  `json:"container"` // null: not looked at yet
	Operations []webOperation `json:"operations,omitempty"`
}

// webStatus is how a service is, in a word.
type webStatus struct {
	Level string `json:"level"` // ok, busy, warn, bad, idle
	Text  string `json:"text"`
}

// webUnit is the systemd user unit: its properties under their own names, none of which is a path.
type webUnit struct {
	Name             string   `json:"name"`
	LoadState        string   `json:"load_state"`
	ActiveState      string   `json:"active_state"`
	SubState         string   `json:"sub_state"`
	Result           string   `json:"result"`
	InvocationID     string   `json:"invocation_id"`
	NRestarts        uint32   `json:"n_restarts"`
	MainPID          uint32   `json:"main_pid"`
	JobQueued        bool     `json:"job_queued"`
	NeedDaemonReload bool     `json:"need_daemon_reload"`
	SeenAt           wireTime `json:"seen_at"`
}

// webContainer is the unit's container as Podman described it.
type webContainer struct {
	State     string    `json:"state"` // Podman's word, or none
	Name      string    `json:"name,omitempty"`
	ID        string    `json:"id,omitempty"`
	Image     string    `json:"image,omitempty"`
	ImageID   string    `json:"image_id,omitempty"`
	StartedAt *wireTime `json:"started_at"`
	SeenAt    wireTime  `json:"seen_at"`
	Outdated  bool      `json:"outdated"` // the unit has another main process since
}

// webOperation is an operation with the end of its log.
type webOperation struct {
	wireOperation
	Log     []wireLogLine `json:"log"`
	Omitted int           `json:"log_lines_omitted"` // before those
}

// lookedUnit and lookedContainer are what a look found, and when.
type lookedUnit struct {
	name   string // "" before the first look
	status unitStatus
	at     time.Time
}

type lookedContainer struct {
	looked    bool
	container // no ID: there was none
	at        time.Time
}

// looking passes a service's calls to the host on, and keeps what it sees of its unit and container. A
// service looks at no unit but its own.
type looking struct {
	units
	containers
	s *service
}

func (l looking) Unit(ctx context.Context, name string) (unitStatus, error) {
	st, err := l.units.Unit(ctx, name)
	if err == nil {
		l.s.live.Lock()
		l.s.live.unit = lookedUnit{name, st, l.s.now()}
		l.s.live.Unlock()
	}
	return st, err
}

func (l looking) Containers(ctx context.Context, service, unit, name string) ([]container, error) {
	list, err := l.containers.Containers(ctx, service, unit, name)
	if err == nil {
		var own container
		for _, c := range list {
			if c.Unit == unit {
				own = c
			}
		}
		l.sawContainer(own)
	}
	return list, err
}

func (l looking) Container(ctx context.Context, nameOrID string) (container, error) {
	c, err := l.containers.Container(ctx, nameOrID)
	switch {
	case err == nil && l.isOwn(c.Unit): // another one's, of that name, is not shown
		l.sawContainer(c)
	case errors.Is(err, errNotFound):
		l.sawContainer(container{})
	}
	return c, err
}

// isOwn tells that a unit is the one that the service looked at.
func (l looking) isOwn(unit string) bool {
	l.s.live.Lock()
	defer l.s.live.Unlock()
	return unit != "" && unit == l.s.live.unit.name
}

func (l looking) sawContainer(c container) {
	l.s.live.Lock()
	defer l.s.live.Unlock()
	l.s.live.container = lookedContainer{true, c, l.s.now()}
}

// pastOperation is an ended operation with the end of its log.
type pastOperation struct {
	op      *operation
	lines   []logLine
	omitted int
}

func pastOf(op *operation, log *operationLog) pastOperation {
	lines, _ := log.since(0)
	n := max(0, len(lines)-maxShown)
	return pastOperation{op, slices.Clone(lines[n:]), n}
}

// readRecent reads the newest archived operations. What cannot be read is left out: fsck tells of it.
func (s *service) readRecent(r *record) []pastOperation {
	ids, err := s.data.operationIDs(s.name)
	if err != nil {
		s.log.Warn("reading recent operations", "err", err)
	}
	var recent []pastOperation
	for _, id := range ids {
		if r.Operation != nil && r.Operation.ID == id {
			continue
		}
		if len(recent) == maxRecent {
			break
		}
		if op, err := s.data.operation(s.name, id); err == nil {
			recent = append(recent, pastOf(op, s.data.openLog(s.name, id)))
		}
	}
	return recent
}

// web is the service as its page shows it, from memory.
func (s *service) web(operations bool) webService {
	r := s.rec.Load()
	v := webService{wireService: s.view(false), Known: r != nil}
	if op := v.ActiveOperation; op != nil && r != nil && r.Operation != nil && r.Operation.ID == op.ID {
		v.Untouched = state(op.State) == preparing || state(op.State) == activating && r.Operation.State == activating && r.Operation.Step == ""
	}
	v.Status = statusOf(v.wireService)
	s.live.Lock()
	u, c, recent := s.live.unit, s.live.container, s.live.recent
	s.live.Unlock()
	if u.name != "" {
		st := u.status
		v.Unit = &webUnit{Name: u.name, LoadState: st.LoadState, ActiveState: st.ActiveState, SubState: st.SubState, Result: st.Result, InvocationID: st.InvocationID,
			NRestarts: st.NRestarts, MainPID: st.MainPID, JobQueued: st.Job != 0, NeedDaemonReload: st.NeedDaemonReload, SeenAt: wireTime(u.at)}
	}
	if c.looked {
		v.Container = &webContainer{State: "none", SeenAt: wireTime(c.at), Outdated: u.at.After(c.at) && u.status.MainPID != c.ConmonPID}
		if c.ID != "" {
			v.Container.State, v.Container.Name, v.Container.ID, v.Container.Image, v.Container.ImageID = c.Status, c.Name, shortID(c.ID), c.ImageName, c.ImageID
			if !c.StartedAt.IsZero() {
				v.Container.StartedAt = wireTimeOf(&c.StartedAt)
			}
		}
	}
	if !operations {
		return v
	}
	if r != nil && r.Operation != nil {
		if log := s.logOf(r.Operation.ID); log != nil {
			recent = append([]pastOperation{pastOf(r.Operation, log)}, recent...)
		}
	}
	for _, p := range recent {
		o := webOperation{wireOperation: s.wire(p.op), Log: []wireLogLine{}, Omitted: p.omitted}
		for _, l := range p.lines {
			o.Log = append(o.Log, wireLogLineOf(l))
		}
		v.Operations = append(v.Operations, o)
	}
	return v
}

// statusOf is what a reader is to know first.
func statusOf(v wireService) webStatus {
	if slices.ContainsFunc(v.Actions, func(a wireAction) bool { return a.Reason == "state_unavailable" }) {
		return webStatus{"bad", "Records unavailable"}
	}
	if op := v.ActiveOperation; op != nil {
		if state(op.State) == rollingBack {
			return webStatus{"warn", "Rolling back"}
		}
		return webStatus{"busy", stateWords[op.State]}
	}
	switch h := v.Health; {
	case v.Retired != nil && v.Retired.Done:
		return webStatus{"idle", "Retired"}
	case v.Retired != nil:
		return webStatus{"idle", "Retiring"}
	case v.Suspended != nil:
		return webStatus{"idle", "Suspended"}
	case v.Held != nil:
		return webStatus{"bad", "Held"}
	case h.State == "running" && h.Ready:
		return webStatus{"ok", "Ready"}
	case h.State == "running":
		return webStatus{"warn", "Not ready"}
	case h.State == "starting":
		return webStatus{"warn", "Starting"}
	case h.State == "failed":
		return webStatus{"bad", "Failed"}
	case h.State == "foreign":
		return webStatus{"bad", "Not Toad’s instance"}
	case h.State == "stopped" && v.Current == nil:
		return webStatus{"idle", "Nothing deployed"}
	case h.State == "stopped":
		return webStatus{"bad", "Stopped"}
	}
	return webStatus{"idle", "Unknown"}
}

// stateWords are the states of an operation as the page names them.
var stateWords = map[string]string{
	"preparing": "Preparing", "activating": "Switching over", "probation": "In probation", "promoting": "Promoting",
	"rolling_back": "Rolling back", "promoted": "Promoted", "rolled_back": "Rolled back", "failed": "Failed",
}

// Warnings are what needs a look though the service may serve.
func (v webService) Warnings() []string {
	var w []string
	if !v.Enrollment.Valid && v.Status.Text != "Records unavailable" && v.Retired == nil {
		w = append(w, "its enrollment is not valid: it takes no deployment")
	}
	if v.Rollback != nil {
		for _, p := range v.Rollback.Problems {
			w = append(w, "the retained rollback cannot be restored: "+p.Summary)
		}
	}
	if v.Held != nil {
		w = append(w, "held until what is still there is gone: "+strings.Join(v.Held.Remains, "; "))
	}
	if v.Suspended != nil && len(v.Suspended.Remains) > 0 {
		w = append(w, "suspended, and still there: "+strings.Join(v.Suspended.Remains, "; "))
	}
	if v.Retired != nil && len(v.Retired.Remains) > 0 {
		w = append(w, "retiring, and still there: "+strings.Join(v.Retired.Remains, "; "))
	}
	if v.Barrier != nil {
		w = append(w, "a rollback barrier is raised: no deployment until it is lifted")
	}
	if v.Current != nil && !v.Installed && v.ActiveOperation == nil && v.Suspended == nil && v.Retired == nil {
		w = append(w, "the promoted unit is not in place yet: a boot would not start it")
	}
	return w
}

// Alert tells that somebody should look.
func (v webService) Alert() bool {
	return v.Status.Level == "bad" || v.Status.Level == "warn" || len(v.Warnings()) > 0
}

// Newest is the operation under way or last ended.
func (v webService) Newest() *wireOperation {
	if v.ActiveOperation != nil {
		return v.ActiveOperation
	}
	return v.LastOperation
}

// Headline says how everything is in one sentence.
func (p webPage) Headline() string {
	busy, alert, ready := 0, 0, 0
	for _, s := range p.Services {
		switch {
		case s.ActiveOperation != nil:
			busy++
		case s.Alert():
			alert++
		case s.Status.Level == "ok":
			ready++
		}
	}
	var parts []string
	if alert > 0 {
		parts = append(parts, fmt.Sprintf("%s of %s %s a look", number(alert), number(len(p.Services)), plural(alert, "needs", "need")))
	}
	if busy > 0 {
		parts = append(parts, fmt.Sprintf("%s %s under way", number(busy), plural(busy, "rollout is", "rollouts are")))
	}
	text := strings.Join(parts, ", ")
	switch {
	case len(p.Services) == 0:
		text = "no service is enrolled"
	case text != "":
	case ready == len(p.Services):
		text = plural(ready, "the service is ready", "all services are ready")
	default:
		text = fmt.Sprintf("%s of %s %s ready", number(ready), number(len(p.Services)), plural(ready, "is", "are"))
	}
	return sentence(text)
}

func number(n int) string {
	words := []string{"none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"}
	if n < len(words) {
		return words[n]
	}
	return strconv.Itoa(n)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// Refresh is after how many seconds the page's script looks again.
func (p webPage) Refresh() int {
	if slices.ContainsFunc(p.Services, func(s webService) bool { return s.ActiveOperation != nil }) {
		return 2
	}
	return 10
}

// webStep is one line of an operation's timeline.
type webStep struct {
	State string    // as the API names it
	At    *wireTime // nil: not begun
	Took  string    // "": not over, or the end
	Now   bool
	End   bool
}

// Steps is the way an operation went, and what is still before it unless it goes back.
func (o wireOperation) Steps() []webStep {
	var steps []webStep
	for i, t := range o.Timeline {
		s := webStep{State: t.State, At: &t.At}
		if i+1 < len(o.Timeline) {
			s.Took = span(time.Time(o.Timeline[i+1].At).Sub(time.Time(t.At)).Seconds())
		} else {
			s.Now, s.End = !o.Terminal, o.Terminal
		}
		steps = append(steps, s)
	}
	way := []string{"preparing", "activating", "probation", "promoting", "promoted"}
	if at := slices.Index(way, o.State); at >= 0 && !o.RollbackRequested {
		for _, name := range way[at+1:] {
			steps = append(steps, webStep{State: name})
		}
	} else if o.State == "rolling_back" && o.Previous != nil {
		steps = append(steps, webStep{State: "rolled_back"})
	}
	return steps
}

// webPart is the part of a log that was written in one state.
type webPart struct {
	State string
	Lines []wireLogLine
}

func (o webOperation) Parts() []webPart {
	var parts []webPart
	for i, l := range o.Log {
		if i == 0 || l.State != o.Log[i-1].State {
			parts = append(parts, webPart{State: l.State})
		}
		p := &parts[len(parts)-1]
		p.Lines = append(p.Lines, l)
	}
	return parts
}

// actionTexts are what each action does and the command that does it; the page does none of them.
var actionTexts = map[string]struct{ name, does, command string }{
	"deploy":             {"Deploy an image", "Stop the running instance, watch the new one, promote it or go back.", "toad deploy %s IMAGE@DIGEST"},
	"rollback":           {"Go back to the retained revision", "Deploy what was current before, like any deployment.", "toad rollback %s"},
	"rollback_operation": {"End the rollout under way", "Stop the candidate and put back what ran before.", "toad rollback %s"},
	"reconcile":          {"Lift the rollback barrier", "After what the barrier protects was looked after by hand.", "toad reconcile %s"},
	"suspend":            {"Suspend", "Stop it and keep it stopped, also over a boot.", "toad suspend %s"},
	"resume":             {"Resume", "Start the current revision again.", "toad resume %s"},
}

// reasonTexts say why an action is not possible now.
var reasonTexts = map[string]string{
	"rollout_active":     "a rollout is under way",
	"enrollment_invalid": "its enrollment is not valid",
	"held":               "the service is held",
	"suspended":          "the service is suspended",
	"rollback_barrier":   "a rollback barrier is raised",
	"no_barrier":         "no barrier is raised",
	"not_suspended":      "it is not suspended",
	"no_revision":        "nothing was promoted yet",
	"shutting_down":      "Toad is shutting down",
	"state_unavailable":  "its records cannot be read or written",

	"not_rollbackable rollback":           "no revision is retained, or the current one came by going back",
	"not_rollbackable rollback_operation": "no rollout is under way that could be ended",
}

// webAction is an action in words.
type webAction struct {
	Name, Does, Command, Reason string
	Enabled                     bool
}

func (v webService) Can() []webAction {
	var list []webAction
	for _, a := range v.Actions {
		t, ok := actionTexts[a.Name]
		if !ok {
			t.name = strings.ReplaceAll(a.Name, "_", " ")
		}
		w := webAction{Name: t.name, Does: t.does, Enabled: a.Enabled, Reason: reasonTexts[a.Reason]}
		if t.command != "" {
			w.Command = fmt.Sprintf(t.command, v.Service)
		}
		if w.Reason == "" {
			w.Reason = reasonTexts[a.Reason+" "+a.Name]
		}
		if w.Reason == "" {
			w.Reason = strings.ReplaceAll(a.Reason, "_", " ")
		}
		list = append(list, w)
	}
	return list
}

// span is a duration for people.
func span(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < time.Second:
		return fmt.Sprintf("%.1f s", max(d.Seconds(), 0))
	case d < 10*time.Second && d%time.Second != 0:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", math.Floor(d.Seconds()*10)/10), ".0") + " s"
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < time.Hour && d%time.Minute < time.Second:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return strings.TrimSuffix(fmt.Sprintf("%d h %d min", int(d.Hours()), int(d.Minutes())%60), " 0 min")
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}

// plain takes control and format characters out of a text that an image or a registry had a part in: they
// could turn the line around or hide some of it.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.In(r, unicode.Cf, unicode.Zl, unicode.Zp) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// sentence is a plain text with a capital and a full stop.
func sentence(s string) string {
	if s = strings.TrimSuffix(plain(s), "."); s == "" {
		return ""
	}
	first, size := utf8.DecodeRuneInString(s)
	return string(unicode.ToUpper(first)) + s[size:] + "."
}

//go:embed web
var webFiles embed.FS

// webAsset is a file beside the page, under a name that changes with it.
type webAsset struct {
	kind string
	body []byte
}

var webAssets, webNames = func() (map[string]webAsset, map[string]string) {
	assets, names := map[string]webAsset{}, map[string]string{}
	for _, name := range []string{"page.css", "page.js", "toad.svg"} {
		b, err := webFiles.ReadFile("web/" + name)
		if err != nil {
			panic(err)
		}
		ext := path.Ext(name)
		names[name] = "/" + strings.TrimSuffix(name, ext) + "." + sumHex(b)[:12] + ext
		assets[names[name]] = webAsset{mime.TypeByExtension(ext), b}
	}
	return assets, names
}()

var webTemplate = template.Must(template.New("").Funcs(template.FuncMap{
	"asset": func(name string) string { return webNames[name] },
	"clock": func(t any) string { return timeOf(t).Format("2 Jan 2006, 15:04:05 UTC") },
	"hms":   func(t any) string { return timeOf(t).Format("15:04:05") },
	"iso":   func(t any) string { return timeOf(t).Format(wireTimeForm) },
	"ago": func(t any, now wireTime) string {
		d := time.Time(now).Sub(timeOf(t))
		switch {
		case d < 5*time.Second:
			return "just now"
		case d < 2*time.Minute:
			return fmt.Sprintf("%d s ago", int(d.Seconds()))
		case d < time.Hour:
			return fmt.Sprintf("%d min ago", int(d.Minutes()))
		case d < 48*time.Hour:
			return fmt.Sprintf("%d h ago", int(d.Hours()))
		}
		return fmt.Sprintf("%d days ago", int(d.Hours()/24))
	},
	"until": func(t any, now wireTime) string {
		return span(math.Floor(max(timeOf(t).Sub(time.Time(now)).Seconds(), 0)))
	},
	"short": func(digest string) string {
		hex := strings.TrimPrefix(digest, "sha256:")
		return hex[:min(12, len(hex))]
	},
	"span":  span,
	"plain": plain,

	"sentence": sentence,
	"word":     func(state string) string { return stateWords[state] },
	"level": func(state string) string {
		switch state {
		case "promoted":
			return "ok"
		case "rolled_back", "rolling_back":
			return "warn"
		case "failed":
			return "bad"
		}
		return "busy"
	},
	"dict": func(page webPage, v any) map[string]any { return map[string]any{"Page": page, "V": v} },
}).ParseFS(webFiles, "web/*.html"))

// timeOf takes both forms that wire types have.
func timeOf(t any) time.Time {
	if p, ok := t.(*wireTime); ok {
		return time.Time(*p).UTC()
	}
	return time.Time(t.(wireTime)).UTC()
}

// secure sets what every answer to a browser carries: nothing from elsewhere, nothing inline, no frame.
func secure(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
	h.Set("Cache-Control", "no-store")
}

// webHandler serves the page: GET and HEAD, and nothing that changes anything.
func (d *daemon) webHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !readOnly(w, r, d.log) || serveAsset(w, r) {
			return
		}
		page := webPage{Host: r.Host, Version: buildVersion().Version, At: wireTime(d.host.wall().UTC()), Services: []webService{}}
		name, asJSON := strings.CutSuffix(r.URL.Path, ".json")
		view := ""
		if one, ok := strings.CutPrefix(name, "/services/"); ok {
			if s := d.known(one); s != nil {
				view, page.Self = "service", name+".json"
				page.Services = append(page.Services, s.web(true))
			}
		} else if r.URL.Path == "/" || r.URL.Path == "/index.json" {
			view, page.Self = "overview", "/index.json"
			for _, s := range d.all() {
				page.Services = append(page.Services, s.web(false))
			}
		}
		if view == "" {
			writePage(w, d.log, http.StatusNotFound, "error", errorPage{"There is no such page", "The link may be mistyped, or the service was never enrolled here."})
			return
		}
		if asJSON {
			if err := writeJSON(w, http.StatusOK, page); err != nil {
				d.log.Error("answering", "path", r.URL.Path, "err", err)
			}
			return
		}
		writePage(w, d.log, http.StatusOK, view, page)
	})
}

// readOnly tells that the request is one for reading, and answers any other itself.
func readOnly(w http.ResponseWriter, r *http.Request, log *slog.Logger) bool {
	secure(w.Header())
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return true
	}
	w.Header().Set("Allow", "GET, HEAD")
	writePage(w, log, http.StatusMethodNotAllowed, "error", errorPage{"This page is to be read only", "Toad is told what to do elsewhere: by its commands on the host, or with a token."})
	return false
}

// serveAsset answers if the request is for a file beside the page.
func serveAsset(w http.ResponseWriter, r *http.Request) bool {
	a, ok := webAssets[r.URL.Path]
	if ok {
		w.Header().Set("Content-Type", a.kind)
		w.Header().Set("Cache-Control", "private, max-age=31536000, immutable")
		_, _ = w.Write(a.body)
	}
	return ok
}

// errorPage is a page that says why there is none.
type errorPage struct{ Title, Text string }

// writePage renders the whole page before a byte of it is sent.
func writePage(w http.ResponseWriter, log *slog.Logger, status int, name string, data any) {
	var buf bytes.Buffer
	if err := webTemplate.ExecuteTemplate(&buf, name, data); err != nil {
		log.Error("rendering", "page", name, "err", err)
		http.Error(w, "the page could not be made; see the journal of toad", http.StatusInternalServerError)
		return
	}
	secure(w.Header())
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Length", strconv.Itoa(buf.Len()))
	w.WriteHeader(status)
	_, _ = w.Write(buf.Bytes()) // net/http leaves it out of an answer to HEAD
}
