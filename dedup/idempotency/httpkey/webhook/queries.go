package webhook

// ageSQL is how old a delivery is, by the clock that also decides how long its ID is remembered.
const ageSQL = `-- webhook.age
SELECT extract(epoch FROM clock_timestamp())::float8 - $1::float8`
