//! Parser for the output of `redis-benchmark`, Redis's own benchmark, which cross-checks our client.

/// Results that `redis-benchmark --csv` printed for one test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Said {
    /// Operations per second.
    pub ops_per_s: f64,
    /// Median latency in microseconds; missing before release 6.2.
    pub p50_us: Option<f64>,
    /// 99th percentile of the latency in microseconds; missing before release 6.2.
    pub p99_us: Option<f64>,
}

/// Parses the results of the test `test` from the output of `redis-benchmark --csv`.
///
/// # Errors
/// The output has no line, or no rate, for `test`.
pub fn parse(output: &str, test: &str) -> Result<Said, String> {
    let rows = || output.lines().map(|line| fields(line).collect::<Vec<_>>());
    let row = rows().find(|row| row.first() == Some(&test));
    let row = row.ok_or_else(|| format!("the output has no line for {test}"))?;
    let positive =
        |text: &&str| text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    let heading = rows().find(|row| row.first() == Some(&"test"));
    let column = |name: &str| heading.as_ref()?.iter().position(|column| *column == name);
    let us = |name: &str| column(name).and_then(|at| row.get(at)).and_then(positive).map(|ms| ms * 1e3);
    let rate = row.get(column("rps").unwrap_or(1)).and_then(positive);
    let ops_per_s = rate.ok_or_else(|| format!("the output has no rate for {test}: {}", row.join(",")))?;
    Ok(Said { ops_per_s, p50_us: us("p50_latency_ms"), p99_us: us("p99_latency_ms") })
}

/// Splits a line into its fields. No field contains a comma or a quotation mark.
fn fields(line: &str) -> impl Iterator<Item = &str> {
    line.split(',').map(|field| field.trim().trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SINCE_6_2: &str = concat!(
        r#""test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","#,
        r#""p99_latency_ms","max_latency_ms""#,
        "\n",
        r#""SET","1.00","2","3","4","5","6","7""#,
        "\n",
        r#""GET","456621.00","0.135","0.064","0.127","0.183","0.247","0.687""#,
        "\n",
    );

    #[test]
    fn rate_and_percentiles_are_found_by_their_headings() {
        let said = parse(SINCE_6_2, "GET").unwrap();
        assert_eq!(said, Said { ops_per_s: 456_621.0, p50_us: Some(127.0), p99_us: Some(247.0) });
    }

    #[test]
    fn output_with_only_the_rate_is_read() {
        let said = parse("\"GET\",\"90909.09\"\n", "GET").unwrap();
        assert_eq!(said, Said { ops_per_s: 90_909.09, p50_us: None, p99_us: None });
    }

    #[test]
    fn output_without_a_rate_is_an_error() {
        for (output, reason) in [
            ("", "no line for GET"),
            ("\"SET\",\"1.0\"\n", "no line for GET"),
            ("Could not connect to Redis at 127.0.0.1:1: Connection refused\n", "no line for GET"),
            ("\"GET\"\n", "no rate for GET"),
            ("\"GET\",\"inf\"\n", "no rate for GET"),
            ("\"GET\",\"0.00\"\n", "no rate for GET"),
            ("\"GET\",\"-3\"\n", "no rate for GET"),
            ("GET,fast\n", "no rate for GET"),
        ] {
            let error = parse(output, "GET").unwrap_err();
            assert!(error.contains(reason), "{output}: {error}");
        }
    }
}
