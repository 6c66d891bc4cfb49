package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

const (
	quarantinedMax = 10
	quarantineMax  = 14 * 24 * time.Hour
)

// quarantined are the causes by package and test.
type quarantined map[[2]string]string

// readQuarantine reads the file of .ci/quarantine. It reports all that is wrong with it at once.
func readQuarantine(file string, now time.Time) (quarantined, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	list := quarantined{}
	var problems []error
	wrong := func(line, format string, args ...any) {
		problems = append(problems, fmt.Errorf("%s: %q: %s", file, line, fmt.Sprintf(format, args...)))
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 4 {
			wrong(line, "want PACKAGE TEST YYYY-MM-DD cause")
			continue
		}
		until, err := time.Parse(time.DateOnly, fields[2])
		end := until.Add(24 * time.Hour)
		switch {
		case err != nil:
			wrong(line, "want a day like 2026-01-31: %v", err)
		case now.After(end):
			wrong(line, "the day is over: repair the test or delete it")
		case end.Sub(now) > quarantineMax+24*time.Hour:
			wrong(line, "at most %d days ahead", quarantineMax/(24*time.Hour))
		}
		list[[2]string{fields[0], fields[1]}] = strings.Join(fields[3:], " ")
	}
	if len(list) > quarantinedMax {
		problems = append(problems, fmt.Errorf("%s: %d tests, at most %d", file, len(list), quarantinedMax))
	}
	return list, errors.Join(problems...)
}
