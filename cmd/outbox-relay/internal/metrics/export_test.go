package metrics

var Gauge = gauge
