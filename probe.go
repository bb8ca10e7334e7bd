// probe.go says what counts: one attributable readiness observation, and the arithmetic of
// probation over observations and restarts. It changes nothing.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// target is where and how one instance is asked whether it is ready.
type target struct {
	address string // IP address of the container on the enrolled network
	readiness
}

// probeFunc asks once. Its error's text is public.
type probeFunc func(ctx context.Context, t target) error

// notReady is why an observation does not count, in public words.
type notReady string

func (n notReady) Error() string { return string(n) }

// observation is one look at the instance of a revision.
type observation struct {
	at         time.Time // monotonic: when it was complete
	invocation string
	container  string
	reason     string // "" if it counts as ready
	status     unitStatus
}

func (o observation) ready() bool { return o.reason == "" }

// identity is what must be the same before and after an answer for it to be this instance's.
type identity struct {
	invocation, container, address string
	conmon                         uint32
	started                        time.Time
}

// observe looks at who runs, asks, and looks again: an answer counts only if nothing of the identity
// changed in between. It returns an error only when ctx ended or the host could not be asked.
func observe(ctx context.Context, u units, c containers, probe probeFunc, rev *revision, ref reference) (observation, error) {
	before, st, err := identify(ctx, u, c, rev, ref)
	o := observation{at: time.Now(), status: st, invocation: before.invocation, container: before.container}
	var why notReady
	if errors.As(err, &why) {
		o.reason = string(why)
		return o, nil
	} else if err != nil {
		return o, err
	}
	pctx, cancel := context.WithTimeout(ctx, time.Duration(rev.Enrollment.Readiness.Timeout))
	err = probe(pctx, target{before.address, rev.Enrollment.Readiness})
	cancel()
	if ctx.Err() != nil {
		return o, ctx.Err()
	}
	if err != nil {
		o.at, o.reason = time.Now(), err.Error()
		return o, nil
	}
	after, st, err := identify(ctx, u, c, rev, ref)
	o.at, o.status = time.Now(), st
	switch {
	case errors.As(err, &why):
		o.reason = "it changed while it answered: " + string(why)
	case err != nil:
		return o, err
	case after != before:
		o.reason = "it was replaced or restarted while it answered"
	}
	return o, nil
}

// identify names the instance that runs as this revision, from systemd and Podman together. A notReady
// error says what is missing; podman's ImageDigest is not looked at, because it names whatever digest
// the image was last pulled by.
func identify(ctx context.Context, u units, c containers, rev *revision, ref reference) (identity, unitStatus, error) {
	st, err := u.Unit(ctx, serviceName(rev.Enrollment.Unit))
	if err != nil {
		return identity{}, st, err
	}
	id := identity{invocation: st.InvocationID, conmon: st.MainPID}
	if st.ActiveState != "active" || st.InvocationID == "" || st.MainPID == 0 {
		return id, st, notReady(fmt.Sprintf("the unit is %s (%s)", st.ActiveState, st.SubState))
	}
	k, err := c.Container(ctx, rev.Container)
	if errors.Is(err, errNotFound) {
		return id, st, notReady("there is no container")
	} else if err != nil {
		return id, st, err
	}
	id.container, id.started, id.address = k.ID, k.StartedAt, k.Addresses[rev.Network]
	switch {
	case k.Status != "running":
		return id, st, notReady("the container is " + k.Status)
	case k.ConmonPID != st.MainPID:
		return id, st, notReady("the container of that name is not run by the unit")
	case k.ImageName != ref.Image:
		return id, st, notReady("the container runs another image reference")
	case k.ImageID != ref.ConfigID:
		return id, st, notReady("the container runs another image than the verified one")
	case k.Labels["toad.service"] != rev.Service, k.Labels["toad.generation"] != strconv.FormatInt(rev.Generation, 10),
		k.Labels["toad.operation"] != rev.Operation:
		return id, st, notReady("the container does not carry the labels of this revision")
	case id.address == "":
		return id, st, notReady("the container has no address on the enrolled network")
	}
	return id, st, nil
}

// maxProbeBody bounds what is read of an answer; its status is what counts.
const maxProbeBody = 64 << 10

// httpProbe asks the instance itself: no proxy, no redirect, no kept connection, no compression, and
// no answer out of a cache. Over https it is trusted by roots; nil means the machine's own, of which Toad's
// image has none.
func httpProbe(roots *x509.CertPool) probeFunc {
	return func(ctx context.Context, t target) error { return askOnce(ctx, t, roots) }
}

func askOnce(ctx context.Context, t target, roots *x509.CertPool) error {
	scheme := t.Scheme
	if scheme == "" {
		scheme = "http"
	}
	where := net.JoinHostPort(t.address, strconv.Itoa(t.Port))
	req, err := http.NewRequestWithContext(ctx, "GET", scheme+"://"+where+t.Path, nil)
	if err != nil {
		return notReady("the enrolled readiness path makes no request")
	}
	name := t.Host // a certificate and SNI know no port
	if t.Host != "" {
		req.Host = t.Host
		if host, _, err := net.SplitHostPort(t.Host); err == nil {
			name = host
		}
	}
	req.Header.Set("Cache-Control", "no-store")
	req.Header.Set("User-Agent", "toad")
	tr := &http.Transport{
		Proxy: nil, DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: t.Insecure, RootCAs: roots, ServerName: name}, // #nosec G402: enrolled for a certificate of its own
	}
	defer tr.CloseIdleConnections()
	resp, err := tr.RoundTrip(req) // one exchange: a redirect is an answer like any other
	var op *net.OpError
	var cert *tls.CertificateVerificationError
	switch {
	case ctx.Err() != nil:
		return notReady(fmt.Sprintf("no answer within %s at %s", time.Duration(t.Timeout), where))
	case errors.As(err, &op) && op.Op == "dial":
		return notReady("nothing accepts connections at " + where)
	case errors.As(err, &cert):
		return notReady("its certificate is not trusted, or is for another name, at " + where)
	case err != nil:
		return notReady(fmt.Sprintf("no %s answer at %s", strings.ToUpper(scheme), where))
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(resp.Body, maxProbeBody)); err != nil {
		return notReady("the answer broke off at " + where)
	}
	for _, h := range []string{"Age", "Via", "X-Cache"} {
		if resp.Header.Get(h) != "" {
			return notReady("the answer came from a cache or proxy (" + h + ")")
		}
	}
	switch ok := resp.StatusCode == t.Status || t.Status == 0 && resp.StatusCode/100 == 2; {
	case ok:
		return nil
	case resp.StatusCode/100 == 3:
		return notReady(fmt.Sprintf("the answer is a redirect (%d), which is not followed", resp.StatusCode))
	default:
		return notReady(fmt.Sprintf("status %d at %s", resp.StatusCode, where))
	}
}

// window measures continuous readiness of one instance on the monotonic clock.
type window struct {
	need, gap             time.Duration
	first, last           time.Time // zero: nothing yet
	invocation, container string
}

func newWindow(e *enrollment) window {
	return window{need: time.Duration(e.Probation.StabilityWindow),
		gap: 3*time.Duration(e.Readiness.Interval) + time.Duration(e.Readiness.Timeout)}
}

// add takes one observation and tells whether the window is full. What lost a window already begun is
// returned as a public reason.
func (w *window) add(o observation) (full bool, lost string) {
	begun := !w.first.IsZero()
	switch {
	case !o.ready():
		if begun {
			lost = o.reason
		}
		w.reset()
		return false, lost
	case begun && (o.invocation != w.invocation || o.container != w.container):
		lost, begun = "another instance answers", false
	case begun && o.at.Sub(w.last) > w.gap:
		lost, begun = fmt.Sprintf("%s without an observation", o.at.Sub(w.last).Round(time.Millisecond)), false
	}
	if !begun {
		w.first, w.invocation, w.container = o.at, o.invocation, o.container
	}
	w.last = o.at
	return w.last.Sub(w.first) >= w.need, lost
}

func (w *window) reset() {
	w.first, w.last, w.invocation, w.container = time.Time{}, time.Time{}, "", ""
}

// readyFor is how long the instance has been seen ready without a break.
func (w *window) readyFor() time.Duration { return w.last.Sub(w.first) }

// add takes one status of the unit, signalled or looked at, oldest first. systemd increases NRestarts
// when it schedules a restart, under the old invocation, and sets it to zero when somebody starts or
// restarts the unit by hand; every start makes a new invocation. So the counter alone misses a manual
// restart, and the invocation alone misses what happened between two looks.
func (r restarts) add(u unitStatus) restarts {
	switch {
	case u.InvocationID == "":
		return r // unloaded, or not started yet
	case r.Invocation == "":
		if u.InvocationID == r.Before {
			return r // Toad's own start has not run yet
		}
		r.Count += int(u.NRestarts) // the first sight of it comes late
	case u.InvocationID == r.Before:
		return r // a look that a signal overtook
	case u.InvocationID == r.Invocation:
		switch {
		case u.NRestarts > r.NRestarts:
			r.Count += int(u.NRestarts - r.NRestarts)
			r.NRestarts, r.Pending = u.NRestarts, true
		case !r.Pending: // less: somebody reset it
			r.NRestarts = u.NRestarts
		case u.NRestarts == r.NRestarts && (u.ActiveState == "active" || strings.HasPrefix(u.SubState, "start")):
			r.Pending = false // it runs
		}
		return r
	case u.NRestarts > r.NRestarts:
		r.Count += int(u.NRestarts - r.NRestarts)
	case u.NRestarts == r.NRestarts && r.Pending:
		// the restart that was counted when it was scheduled
	case u.NRestarts == r.NRestarts:
		r.Count++ // by hand
	default: // by hand, and the counter began anew
		r.Count += 1 + int(u.NRestarts)
		if r.Pending {
			r.Count--
		}
	}
	if r.Invocation != "" {
		r.Before = r.Invocation
	}
	r.Invocation, r.NRestarts = u.InvocationID, u.NRestarts
	r.Pending = strings.HasPrefix(u.SubState, "auto-restart-queued")
	return r
}
