package main

import (
	"crypto/x509"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Readiness as it is asked over the wire: which answers count, and what is said of those that do not.
func TestProbe(t *testing.T) {
	var asked *http.Request
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r
		if r.URL.Path == "/elsewhere" {
			http.Redirect(w, r, "/ready", http.StatusFound)
			return
		}
		status, _ := strconv.Atoi(r.URL.Path[1:])
		w.WriteHeader(status)
	})
	plain, secure := httptest.NewServer(handler), httptest.NewTLSServer(handler)
	defer plain.Close()
	defer secure.Close()
	secure.Config.ErrorLog = nil
	trusted := x509.NewCertPool()
	trusted.AddCert(secure.Certificate()) // for example.com and 127.0.0.1

	for name, tt := range map[string]struct {
		server *httptest.Server
		r      readiness
		roots  *x509.CertPool
		says   string // "": ready
	}{
		"ok":                        {plain, readiness{Path: "/204"}, nil, ""},
		"another status":            {plain, readiness{Path: "/503"}, nil, "status 503"},
		"the enrolled status":       {plain, readiness{Path: "/503", Status: 503}, nil, ""},
		"not the enrolled status":   {plain, readiness{Path: "/200", Status: 503}, nil, "status 200"},
		"redirect":                  {plain, readiness{Path: "/elsewhere"}, nil, "redirect"},
		"host":                      {plain, readiness{Path: "/200", Host: "app.example.org"}, nil, ""},
		"https of http":             {plain, readiness{Scheme: "https", Path: "/200"}, trusted, "no HTTPS answer"},
		"https":                     {secure, readiness{Scheme: "https", Path: "/200"}, trusted, ""},
		"https, unknown issuer":     {secure, readiness{Scheme: "https", Path: "/200"}, x509.NewCertPool(), "certificate is not trusted"},
		"https, any issuer":         {secure, readiness{Scheme: "https", Path: "/200", Insecure: true}, nil, ""},
		"https by name":             {secure, readiness{Scheme: "https", Path: "/200", Host: "example.com"}, trusted, ""},
		"https by name and port":    {secure, readiness{Scheme: "https", Path: "/200", Host: "example.com:8443"}, trusted, ""},
		"https by another name":     {secure, readiness{Scheme: "https", Path: "/200", Host: "other.example.org"}, trusted, "for another name"},
		"https, redirect to itself": {secure, readiness{Scheme: "https", Path: "/elsewhere"}, trusted, "redirect"},
	} {
		t.Run(name, func(t *testing.T) {
			addr := tt.server.Listener.Addr().(*net.TCPAddr)
			tt.r.Port, tt.r.Timeout = addr.Port, duration(10*time.Second)
			err := httpProbe(tt.roots)(t.Context(), target{address: addr.IP.String(), readiness: tt.r})
			if tt.says == "" && err != nil || tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("%v, want %q", err, tt.says)
			}
			if tt.r.Host != "" && err == nil && asked.Host != tt.r.Host {
				t.Errorf("it was asked as %q", asked.Host)
			}
		})
	}
}
