package webhook

// ageSQL returns the age of a delivery, by the clock that also decides how long its ID is stored.
const ageSQL = `-- webhook.age
SELECT extract(epoch FROM clock_timestamp())::float8 - $1::float8`
