package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// annotationPlainKafka marks commands that know neither TLS nor SASL: see plainKafka.
const annotationPlainKafka = "plain-kafka"

const flagDatabasePasswordFile = "database-password-file"

// plainKafka marks a command that brings its own Kafka, or takes one of a test bench.
func plainKafka(cmd *cobra.Command) *cobra.Command {
	return annotate(cmd, annotationPlainKafka, "true")
}

// isConnection tells whether a flag says how to reach the database or the brokers.
func isConnection(flag string) bool {
	return isAddress(flag) || flag == flagDatabasePasswordFile || strings.HasPrefix(flag, "kafka-")
}

func (s *settings) addConnectionFlags(flags *pflag.FlagSet) {
	s.databasePassword.flag = flagDatabasePasswordFile
	addOption(flags, flagDatabasePasswordFile, "file", "", "file with the password of the database, before one in the URL; read again for each connection", s.databasePassword.parse)
	s.kafka.addFlags(flags)
	addBool(flags, &s.insecure, "insecure", "let secrets and data go over the network in the clear where the other flags say so")
}

// checkConnections returns every contradiction between the flags of connections.
func (s *settings) checkConnections(cmd *cobra.Command) error {
	problem := s.kafka.check(s.brokers, s.insecure)
	if s.pool != nil && !s.insecure {
		if host, mode := weakest(s.pool.ConnConfig); mode == sslDisable {
			problem = errors.Join(problem, fmt.Errorf("--%s: sslmode=disable to %s, which is another machine, shows data to whoever is on the network between: "+
				"want sslmode=verify-full; --insecure if you trust that network", flagDatabaseURL, host))
		}
	}
	if cmd.Annotations[annotationPlainKafka] != "" && len(s.brokers) > 0 && s.kafka.used() {
		problem = errors.Join(problem, fmt.Errorf("%s knows neither TLS nor SASL: want --brokers without them, or none", cmd.CommandPath()))
	}
	return problem
}

// warn says what goes over the network less safely than it could, unless that was asked for.
func (s *settings) warn(cmd *cobra.Command) {
	if s.insecure || cmd.Annotations[annotationOffline] != "" {
		return
	}
	logger := s.logger(cmd.ErrOrStderr())
	if s.pool != nil {
		if host, mode := weakest(s.pool.ConnConfig); mode != sslVerifyFull {
			logger.Warn("who is between here and the database can pose as it: set sslmode=verify-full and, for an authority of your own, "+
				"sslrootcert=FILE in the database URL; --insecure if you trust that network", "host", host, "sslmode", string(mode))
		}
	}
	if (cmd.Name() == "run" || cmd.Name() == "doctor") && !s.kafka.tls && !allLoopback(s.brokers) {
		logger.Warn("who is between here and the brokers can read and change what is published: give --kafka-tls; --insecure if you trust that network",
			"brokers", strings.Join(s.brokers, ","))
	}
}

// sslMode is what a connection does, by the name of the parameter that asks for it.
type sslMode string

const (
	sslDisable    sslMode = "disable"
	sslPrefer     sslMode = "prefer" // or allow: see encryptedOnly
	sslRequire    sslMode = "require"
	sslVerifyCA   sslMode = "verify-ca"
	sslVerifyFull sslMode = "verify-full"
)

// weakest returns the host that is reached least safely. This machine and its sockets are safe.
func weakest(c *pgx.ConnConfig) (host string, mode sslMode) {
	order := []sslMode{sslDisable, sslPrefer, sslRequire, sslVerifyCA, sslVerifyFull}
	ways := map[string][]*tls.Config{}
	var names []string
	for _, h := range hosts(c) {
		if isLocal(h) {
			continue
		}
		if ways[h.Host] == nil {
			names = append(names, h.Host)
		}
		ways[h.Host] = append(ways[h.Host], h.TLSConfig)
	}
	mode = sslVerifyFull
	for _, name := range names {
		if m := modeOf(ways[name]); slices.Index(order, m) < slices.Index(order, mode) {
			host, mode = name, m
		}
	}
	return host, mode
}

// modeOf reads the mode from the ways in which a host is tried.
func modeOf(ways []*tls.Config) sslMode {
	encrypted := slices.IndexFunc(ways, func(c *tls.Config) bool { return c != nil })
	switch {
	case encrypted < 0:
		return sslDisable
	case slices.Contains(ways, nil):
		return sslPrefer
	case !ways[encrypted].InsecureSkipVerify:
		return sslVerifyFull
	case ways[encrypted].VerifyPeerCertificate != nil:
		return sslVerifyCA
	}
	return sslRequire
}

// encryptedOnly takes away the ways that lead to another machine in the clear: with sslmode=prefer and allow it would
// be who is between, by saying that there is no TLS, who decides.
func encryptedOnly(c *pgx.ConnConfig) {
	kept := slices.DeleteFunc(hosts(c), func(h *pgconn.FallbackConfig) bool { return h.TLSConfig == nil && !isLocal(h) })
	if len(kept) > 0 {
		c.Host, c.Port, c.TLSConfig, c.Fallbacks = kept[0].Host, kept[0].Port, kept[0].TLSConfig, kept[1:]
	}
}

// isLocal tells whether a way stays on this machine.
func isLocal(h *pgconn.FallbackConfig) bool {
	network, _ := pgconn.NetworkAddress(h.Host, h.Port)
	return network == "unix" || isLoopback(h.Host)
}

// usePassword puts the password of the file, as it is now, into a connection that is about to be made.
func (s *settings) usePassword(_ context.Context, config *pgx.ConnConfig) error {
	if !s.databasePassword.given() {
		return nil
	}
	password, err := s.databasePassword.read()
	if err != nil {
		return err
	}
	config.Password = password
	return nil
}

// databaseAddress returns the URL with the password of the file in it, for what takes nothing but a URL.
func (s *settings) databaseAddress() (string, error) {
	text := s.databaseURL.reveal()
	if text == "" || !s.databasePassword.given() {
		return text, nil
	}
	password, err := s.databasePassword.read()
	if err != nil {
		return "", err
	}
	if !strings.HasPrefix(text, "postgres://") && !strings.HasPrefix(text, "postgresql://") {
		return text + " password='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password) + "'", nil
	}
	// Not by the package net/url, which has no lists of hosts. The last one given counts.
	separator := "?"
	if strings.Contains(text, "?") {
		separator = "&"
	}
	return text + separator + "password=" + url.QueryEscape(password), nil
}
