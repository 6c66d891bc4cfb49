package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"time"
)

const commandWatch = "watch"

// watchdog does what an operator of Kafka Connect automates: it creates the connector, and restarts
// it and its tasks when they have failed.
type watchdog struct {
	Connector string // URL
	Config    map[string]string
	Worker    int // process ID: the watchdog ends with it
}

// startWatchdog starts it as a child of this process.
func startWatchdog(w watchdog) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	task, err := json.Marshal(w)
	if err != nil {
		return err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command(program, commandWatch)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = read, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	// It fits into the pipe, and the child has it although this process is replaced.
	if _, err := write.Write(append(task, '\n')); err != nil {
		return err
	}
	return write.Close()
}

func watch(ctx context.Context, stdin io.Reader) error {
	var w watchdog
	if err := json.NewDecoder(stdin).Decode(&w); err != nil {
		return err
	}
	for os.Getppid() == w.Worker {
		if err := w.look(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "watchdog:", err)
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// look creates the connector, or restarts what has failed. While the worker starts there is nothing
// to see.
func (w watchdog) look(ctx context.Context) error {
	type state struct{ State, Trace string }
	var status struct {
		Connector state
		Tasks     []state
	}
	code, err := w.call(ctx, http.MethodGet, "/status", nil, &status)
	switch {
	case err != nil:
		return nil //nolint:nilerr // it starts, or is frozen
	case code == http.StatusNotFound:
		code, err = w.call(ctx, http.MethodPut, "/config", w.Config, nil)
		if err == nil && code >= 300 && code != http.StatusConflict {
			err = fmt.Errorf("the connector is refused with status %d", code)
		}
		return err
	}
	for _, s := range append(status.Tasks, status.Connector) {
		if s.State == "FAILED" {
			fmt.Fprintf(os.Stderr, "watchdog: failed, and is restarted: %.600s\n", s.Trace)
			_, err = w.call(ctx, http.MethodPost, "/restart?includeTasks=true&onlyFailed=true", nil, nil)
			return err
		}
	}
	return nil
}

func (w watchdog) call(ctx context.Context, method, path string, body, answer any) (status int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var text []byte
	if body != nil {
		if text, err = json.Marshal(body); err != nil {
			return 0, err
		}
	}
	request, err := http.NewRequestWithContext(ctx, method, w.Connector+path, bytes.NewReader(text))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	if answer != nil && response.StatusCode < 300 {
		err = json.NewDecoder(response.Body).Decode(answer)
	}
	return response.StatusCode, err
}
