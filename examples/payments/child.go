package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/effectonce/effectonce/examples/startup"
)

// Environment variables of the API's process.
const (
	envDatabase = "PAYMENTS_DATABASE_URL"
	envProvider = "PAYMENTS_PROVIDER_URL"
	envBank     = "PAYMENTS_BANK_URL"
	envTopic    = "PAYMENTS_RECEIPTS_TOPIC"
	envDeath    = "PAYMENTS_DIE_AT"
)

// Points at which the API can be killed.
const (
	atRequest     = "request"
	atReserve     = "reserve"
	atCharge      = "charge"
	atCharged     = "charged"
	atBook        = "book"
	atTransfer    = "transfer"
	atTransferred = "transferred"
	atAnswer      = "answer"
)

// dieAt kills this process as kill -9 does: it rolls back, unlocks and sends nothing more.
func dieAt(point string) {
	if os.Getenv(envDeath) != point {
		return
	}
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Kill()
	}
	select {}
}

// serve is the API's process: it prints its address, and ends when the process that started it
// does.
func serve(ctx context.Context) error {
	pool, err := startup.Connect(ctx, os.Getenv(envDatabase), schema)
	if err != nil {
		return err
	}
	defer pool.Close()
	provider := &providerClient{os.Getenv(envProvider), &http.Client{}} // FlowConfig.CallMax bounds its calls
	handler, err := newAPI(pool, provider, newBankClient(os.Getenv(envBank)), os.Getenv(envTopic))
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders", handler)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go handler.flow.Run(ctx)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // it is closed when the parent ends
		_ = server.Close()
	}()
	if _, err := fmt.Fprintln(os.Stdout, "http://"+listener.Addr().String()); err != nil {
		return err
	}
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
