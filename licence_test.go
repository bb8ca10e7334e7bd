package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/google/licensecheck"
)

// licences are those that what is linked into the binary may have: all let it be handed on under its own.
var licences = []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "MPL-2.0"}

// TestLicences: each module that is linked into the binary comes under licences of that list, and says so.
func TestLicences(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", "-json=Module", ".").Output()
	if err != nil {
		t.Fatalf("listing what is linked: %v", err)
	}
	dirs := map[string]string{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			Module *struct {
				Path, Dir string
				Main      bool
			}
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if p.Module != nil && !p.Module.Main {
			dirs[p.Module.Path] = p.Module.Dir
		}
	}
	if len(dirs) < 20 {
		t.Errorf("only %d modules", len(dirs))
	}
	name := regexp.MustCompile(`(?i)^(licen[cs]e|unlicense)`)
	for module, dir := range dirs {
		entries, err := os.ReadDir(dir)
		must(t, err)
		found := false
		for _, kind := range []*regexp.Regexp{name, regexp.MustCompile(`(?i)^copying`)} { // the second only if there is none of the first
			for _, e := range entries {
				if found && kind != name || e.IsDir() || !kind.MatchString(e.Name()) || e.Name() == "LICENSE.docs" {
					continue
				}
				text, err := os.ReadFile(filepath.Join(dir, e.Name()))
				must(t, err)
				scan := licensecheck.Scan(text)
				if scan.Percent < 75 || len(scan.Match) == 0 {
					t.Errorf("%s: %s is no licence that is known (%.0f%% of its text)", module, e.Name(), scan.Percent)
				}
				for _, m := range scan.Match {
					if found = true; !slices.Contains(licences, m.ID) {
						t.Errorf("%s: %s is %s", module, e.Name(), m.ID)
					}
				}
			}
		}
		if !found {
			t.Errorf("%s comes without a licence", module)
		}
	}
}
