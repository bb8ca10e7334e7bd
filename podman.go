// podman.go holds everything that is said to Podman, over its HTTP API and nothing else: looking at
// containers, images, networks and events, loading an archive, removing a container. It decides
// nothing, keeps nothing between calls, and knows nothing of operations or of the registry.
//
// Of the bindings only the root package is used (its sub-packages need build tags): Connection, and
// APIResponse with ErrorModel for the answer. The connection is made here and not by
// bindings.NewConnection, which pings without a bound and leaves its idle connections open: those
// keep Podman's service and its 50 MB alive for ever, and a load sent over one that died meanwhile
// fails. Here each request has a connection of its own, closed with the answer, so a quiet Toad lets
// the service sleep, and one that was restarted is simply dialed again. Nor is DoRequest used, whose
// three tries and 0.6 s of sleep heed neither the context nor what was sent (measured).
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containers/podman/v5/pkg/bindings"
	"github.com/containers/podman/v5/pkg/errorhandling"
	podmanversion "github.com/containers/podman/v5/version"
)

// errUnreachable: nobody took the connection, so nothing was said and nothing was done.
var errUnreachable = errors.New("podman cannot be reached")

type podman struct {
	conn    *bindings.Connection
	timeout time.Duration // of each call but Load, whatever the caller's context says
}

var _ containers = (*podman)(nil)

// newPodman speaks to the socket of a URI like unix:///run/toad/podman/podman.sock. Nothing is dialed
// before the first call.
func newPodman(uri string) *podman {
	p := &podman{timeout: 10 * time.Second}
	u := &url.URL{Scheme: "unix", Path: strings.TrimPrefix(uri, "unix://")}
	p.conn = &bindings.Connection{URI: u, Client: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := (&net.Dialer{Timeout: p.timeout}).DialContext(ctx, "unix", u.Path)
			if err != nil {
				err = fmt.Errorf("%w: %w", errUnreachable, err)
			}
			return conn, err
		},
		DisableCompression: true,
		DisableKeepAlives:  true,
	}}}
	return p
}

// send sends one request, once.
func (p *podman) send(ctx context.Context, method, path string, query url.Values, body io.Reader) (*bindings.APIResponse, error) {
	v := podmanversion.APIVersion[podmanversion.Libpod][podmanversion.CurrentAPI]
	u := fmt.Sprintf("http://d/v%d.%d.%d/libpod%s?%s", v.Major, v.Minor, v.Patch, path, query.Encode())
	req, err := http.NewRequestWithContext(ctx, method, u, body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/x-tar")
	}
	resp, err := p.conn.Client.Do(req)
	if err != nil {
		return nil, err
	}
	return &bindings.APIResponse{Response: resp, Request: req}, nil
}

// get asks up to three times, until there is an answer: this bridges a restart of podman.socket.
func (p *podman) get(ctx context.Context, path string, query url.Values) (*bindings.APIResponse, error) {
	for pause := 100 * time.Millisecond; ; pause *= 2 {
		resp, err := p.send(ctx, http.MethodGet, path, query, nil)
		if err == nil || ctx.Err() != nil || pause > 200*time.Millisecond {
			return resp, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ctx.Err(), err)
		}
	}
}

// read gets something and decodes it.
func (p *podman) read(ctx context.Context, into any, path string, query url.Values) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	resp, err := p.get(ctx, path, query)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return notFound(resp.Process(into))
}

// write sends what must not be repeated, exactly once.
func (p *podman) write(ctx context.Context, method, path string, query url.Values, body io.Reader) error {
	resp, err := p.send(ctx, method, path, query, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return notFound(resp.Process(nil))
}

// notFound marks the error of an answer that says 404.
func notFound(err error) error {
	if m, ok := errors.AsType[*errorhandling.ErrorModel](err); ok && m.Code() == http.StatusNotFound {
		return fmt.Errorf("%w: %w", errNotFound, err)
	}
	return err
}

// inspection is the part of a container's inspection that Toad uses.
type inspection struct {
	ID        string `json:"Id"`
	Name      string
	ImageName string
	Image     string
	State     struct {
		Status    string
		ConmonPid uint32
		StartedAt time.Time
	}
	Config          struct{ Labels map[string]string }
	NetworkSettings struct {
		Networks map[string]struct {
			IPAddress, Gateway             string
			IPPrefixLen                    int
			GlobalIPv6Address, IPv6Gateway string
			GlobalIPv6PrefixLen            int
		}
	}
	Mounts []struct{ Source, Destination string }
}

func (i *inspection) addresses() map[string]string {
	addresses := make(map[string]string)
	for name, n := range i.NetworkSettings.Networks {
		if a := n.IPAddress; a != "" {
			addresses[name] = a
		} else if a := n.GlobalIPv6Address; a != "" {
			addresses[name] = a
		}
	}
	return addresses
}

func (p *podman) inspect(ctx context.Context, nameOrID string) (*inspection, error) {
	var i inspection
	if err := p.read(ctx, &i, "/containers/"+url.PathEscape(nameOrID)+"/json", nil); err != nil {
		return nil, fmt.Errorf("inspecting container %s: %w", nameOrID, err)
	}
	return &i, nil
}

// Containers asks for all and picks here, because Podman ANDs filters of different kinds. Each that
// is picked is inspected; one that vanishes in between is gone, and left out.
func (p *podman) Containers(ctx context.Context, service, unit, name string) ([]container, error) {
	var all []struct {
		ID     string `json:"Id"`
		Names  []string
		Labels map[string]string
	}
	if err := p.read(ctx, &all, "/containers/json", url.Values{"all": {"true"}}); err != nil {
		return nil, fmt.Errorf("listing containers: %w", err)
	}
	var found []container
	for _, c := range all {
		if !(name != "" && slices.Contains(c.Names, name)) &&
			!(unit != "" && c.Labels["PODMAN_SYSTEMD_UNIT"] == unit) &&
			!(service != "" && c.Labels["toad.service"] == service) {
			continue
		}
		one, err := p.Container(ctx, c.ID)
		if errors.Is(err, errNotFound) {
			continue
		} else if err != nil {
			return nil, err
		}
		found = append(found, one)
	}
	return found, nil
}

func (p *podman) Container(ctx context.Context, nameOrID string) (container, error) {
	i, err := p.inspect(ctx, nameOrID)
	if err != nil {
		return container{}, err
	}
	if i.ID != nameOrID && i.Name != nameOrID { // Podman also takes the beginning of an id
		return container{}, fmt.Errorf("inspecting container %s: %w", nameOrID, errNotFound)
	}
	return container{
		ID:        i.ID,
		Name:      i.Name,
		Status:    i.State.Status,
		ConmonPID: i.State.ConmonPid,
		ImageName: i.ImageName,
		ImageID:   imageID(i.Image),
		Unit:      i.Config.Labels["PODMAN_SYSTEMD_UNIT"],
		Labels:    i.Config.Labels,
		StartedAt: i.State.StartedAt,
		Addresses: i.addresses(),
	}, nil
}

// Self inspects the container that Toad itself runs in, found by the first 12 digits of its id: the
// host's paths of its mounts by destination.
func (p *podman) Self(ctx context.Context, id12 string) (mounts map[string]string, err error) {
	i, err := p.inspect(ctx, id12)
	if err != nil {
		return nil, err
	}
	if len(id12) != 12 || !strings.HasPrefix(i.ID, id12) {
		return nil, fmt.Errorf("inspecting container %s: %w: this is no id of a container", id12, errNotFound)
	}
	mounts = make(map[string]string)
	for _, m := range i.Mounts {
		mounts[m.Destination] = m.Source
	}
	return mounts, nil
}

// Subnets tells of a container's network which addresses are on it; none if it is not on that network.
func (p *podman) Subnets(ctx context.Context, id12, network string) ([]subnet, error) {
	i, err := p.inspect(ctx, id12)
	if err != nil {
		return nil, err
	}
	n := i.NetworkSettings.Networks[network]
	var subnets []subnet
	for _, a := range []struct {
		address, gateway string
		bits             int
	}{{n.IPAddress, n.Gateway, n.IPPrefixLen}, {n.GlobalIPv6Address, n.IPv6Gateway, n.GlobalIPv6PrefixLen}} {
		address, _ := netip.ParseAddr(a.address)
		gateway, _ := netip.ParseAddr(a.gateway) // a network may have none
		if prefix, err := address.Prefix(a.bits); err == nil && a.bits > 0 && address.IsValid() {
			subnets = append(subnets, subnet{prefix, gateway})
		}
	}
	return subnets, nil
}

var fullID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Remove kills at once (timeout=0) and keeps volumes. It takes full ids only, which nobody can give
// to another container in the meantime.
func (p *podman) Remove(ctx context.Context, id string) error {
	if !fullID.MatchString(id) {
		return fmt.Errorf("removing container %q: not a full id", id)
	}
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	query := url.Values{"force": {"true"}, "timeout": {"0"}, "volumes": {"false"}, "depend": {"false"}}
	err := p.write(ctx, http.MethodDelete, "/containers/"+id, query, nil)
	if err != nil && !errors.Is(err, errNotFound) {
		return fmt.Errorf("removing container %s: %w", id, err)
	}
	return nil
}

func (p *podman) Image(ctx context.Context, ref string) (string, error) {
	var image struct {
		ID string `json:"Id"`
	}
	if err := p.read(ctx, &image, "/images/"+url.PathEscape(ref)+"/json", nil); err != nil {
		return "", fmt.Errorf("inspecting image %s: %w", ref, err)
	}
	return imageID(image.ID), nil
}

// imageID gives an image id in the form of a digest: Podman says it bare.
func imageID(id string) string {
	if fullID.MatchString(id) {
		return "sha256:" + id
	}
	return id
}

// Load is bounded by its context alone. If tar is an io.Closer it is closed when Load returns, so
// that the writer at the other end of a pipe ends as well.
func (p *podman) Load(ctx context.Context, tar io.Reader) error {
	if c, ok := tar.(io.Closer); ok {
		defer c.Close()
	}
	source := &sourceReader{r: tar}
	err := p.write(ctx, http.MethodPost, "/images/load", nil, source)
	if broken := source.broken(); broken != nil { // the transport says only that the body broke
		return fmt.Errorf("loading an image: reading the archive: %w", broken)
	}
	if err != nil {
		return fmt.Errorf("loading an image: %w", err)
	}
	return nil
}

// Starts counts what Podman's event log says. It outlives the container and Toad's own absence, but
// not always a boot (measured).
func (p *podman) Starts(ctx context.Context, name, operation string, since time.Time) (int, error) {
	filters, err := json.Marshal(map[string][]string{"type": {"container"}, "container": {name}, "event": {"start"}})
	if err != nil {
		return 0, err
	}
	query := url.Values{
		"stream":  {"false"},
		"since":   {since.UTC().Format(time.RFC3339Nano)},
		"filters": {string(filters)},
	}
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	resp, err := p.get(ctx, "/events", query)
	if err != nil {
		return 0, fmt.Errorf("reading events of container %s: %w", name, err)
	}
	defer resp.Body.Close()
	if !resp.IsSuccess() {
		return 0, fmt.Errorf("reading events of container %s: %w", name, resp.Process(nil))
	}
	count := 0
	for lines := json.NewDecoder(resp.Body); ; {
		var e struct {
			Type, Action string
			Actor        struct{ Attributes map[string]string }
			TimeNano     int64 `json:"timeNano"`
		}
		if err := lines.Decode(&e); err == io.EOF {
			return count, nil
		} else if err != nil {
			return 0, fmt.Errorf("reading events of container %s: %w", name, err)
		}
		// Podman's filter by container also takes the beginning of an id.
		if e.Type == "container" && e.Action == "start" && e.Actor.Attributes["name"] == name &&
			e.Actor.Attributes["toad.operation"] == operation && e.TimeNano >= since.UnixNano() {
			count++
		}
	}
}

func (p *podman) Exists(ctx context.Context, kind, name string) (bool, error) {
	if kind != "network" && kind != "secret" && kind != "volume" {
		return false, fmt.Errorf("looking for %s %s: no such kind", kind, name)
	}
	err := p.read(ctx, nil, "/"+kind+"s/"+url.PathEscape(name)+"/exists", nil)
	if errors.Is(err, errNotFound) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("looking for %s %s: %w", kind, name, err)
	}
	return true, nil
}
