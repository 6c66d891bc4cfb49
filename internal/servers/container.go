package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
)

const (
	pingMax = 10 * time.Second // a Docker engine that hangs counts as none
	logMax  = 4 << 10          // of a server's log in an error, in bytes
)

// pingDocker reports whether a Docker engine answers.
func pingDocker(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, pingMax)
	defer cancel()
	if host := env("DOCKER_HOST"); host != "" {
		// testcontainers would continue with the default socket, and so use another engine than the
		// one requested.
		docker, err := client.New(client.FromEnv)
		if err != nil {
			return fmt.Errorf("DOCKER_HOST=%s: %w", host, err)
		}
		defer func() { _ = docker.Close() }()
		if _, err := docker.Ping(ctx, client.PingOptions{}); err != nil {
			return fmt.Errorf("ping DOCKER_HOST=%s: %w", host, err)
		}
	}
	provider, err := dockerProvider()
	if err != nil {
		return err
	}
	return provider.Health(ctx)
}

// silence turns off testcontainers' log of each step, which would drown the output of tests and
// demo. Errors carry the end of the server's log instead.
var silence = sync.OnceFunc(func() { log.SetDefault(log.NewNoopLogger()) }) //nolint:gochecknoglobals // as what it sets

func dockerProvider() (*testcontainers.DockerProvider, error) {
	silence()
	return testcontainers.NewDockerProvider()
}

// dockerContainer is a server in a container, at a host port that survives restarts.
type dockerContainer struct {
	testcontainers.Container

	docker client.APIClient
}

// createContainer creates a container and publishes its only exposed port at a port of 127.0.0.1.
func createContainer(ctx context.Context, port int, request testcontainers.ContainerRequest) (*dockerContainer, error) {
	inner, err := network.ParsePort(request.ExposedPorts[0])
	if err != nil {
		return nil, fmt.Errorf("port of image %s: %w", request.Image, err)
	}
	modify := request.HostConfigModifier
	request.HostConfigModifier = func(host *container.HostConfig) {
		host.PortBindings = network.PortMap{
			inner: {{HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: strconv.Itoa(port)}},
		}
		if modify != nil {
			modify(host)
		}
	}
	provider, err := dockerProvider()
	if err != nil {
		return nil, fmt.Errorf("connect to the Docker engine: %w", err)
	}
	created, err := provider.CreateContainer(ctx, request)
	if err != nil {
		if created != nil {
			err = errors.Join(err, created.Terminate(context.WithoutCancel(ctx)))
		}
		return nil, fmt.Errorf("create a container of %s: %w", request.Image, err)
	}
	return &dockerContainer{Container: created, docker: provider.Client()}, nil
}

func (c *dockerContainer) start(ctx context.Context) error { return c.Start(ctx) }

func (c *dockerContainer) alive(ctx context.Context) error {
	state, err := c.State(ctx)
	if err != nil || state.Running {
		return err
	}
	var text []byte
	if logs, err := c.Logs(ctx); err == nil {
		text, _ = io.ReadAll(logs) // as much of it as can be read
		_ = logs.Close()
	}
	return fmt.Errorf("%w with status %d:\n%s", errExited, state.ExitCode, tail(text))
}

func (c *dockerContainer) kill(ctx context.Context) error {
	defer func() { _ = c.docker.Close() }()
	if _, err := c.docker.ContainerKill(ctx, c.GetContainerID(), client.ContainerKillOptions{Signal: "SIGKILL"}); err != nil {
		return fmt.Errorf("kill the container: %w", err)
	}
	return nil
}

// remove does not wait for a clean shutdown: the data is removed with the container.
func (c *dockerContainer) remove(ctx context.Context) error {
	return c.Terminate(ctx, testcontainers.StopTimeout(0))
}

func tail(text []byte) []byte { return text[max(0, len(text)-logMax):] }
