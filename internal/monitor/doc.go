// Package monitor answers, over HTTP, how one replica of the relay goes.
//
//	state := monitor.NewState()
//	config.Hooks = state.Hooks(config.Hooks)
//	server, err := monitor.New(monitor.Config{State: state, Relay: "default", Schema: "effectonce", Metrics: handler})
//	...
//	go server.Run(ctx, listener)
//	server.Ask(pool)
//	state.Running()
//
// /healthz says whether the process has to be restarted, from what the relay's callbacks tell alone: neither the
// database nor the brokers are asked, so that their outage does not restart every replica. /readyz asks the
// database too. Nothing changes anything, no message is ever shown, and what shows internals (/debug/pprof/) is
// only there when it is configured, and behind a token.
package monitor
