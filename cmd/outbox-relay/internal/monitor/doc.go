// Package monitor reports over HTTP the state of one replica of the relay.
//
//	state := monitor.NewState()
//	config.Hooks = state.Hooks()
//	server := monitor.New(monitor.Config{State: state, Relay: "default", Schema: "effectonce", Metrics: handler})
//	...
//	go server.Run(ctx, listener)
//	server.Ask(pool)
//	state.Running()
//
// /healthz reports whether the process has to be restarted, from the relay's callbacks alone. It
// asks neither the database nor the brokers, so that their outage does not restart every replica.
// /readyz asks the database too. No request changes anything, and no message and no internals are
// ever shown.
package monitor
