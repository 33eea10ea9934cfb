//! Prints a comparison for people: a table for each setup, and notes on how to read the tables.
//!
//! Invariant: every statement about which contender is faster is derived from the reports.

use super::our_table;
use super::servers::memcached_table;
use crate::cli::Done;
use farside_bench::compare::rows::{Client, CompareReport, Cores, table};
use farside_systems::registry::default_kv;

/// Maximum width of a note's lines, in columns.
const WIDTH: usize = 112;

/// Prints a table for each setup, in the order of the reports.
pub(super) fn print_tables(reports: &[CompareReport]) -> Done {
    let way = |report: &CompareReport| (report.depth, report.threads, report.cores, report.client);
    for group in reports.chunk_by(|one, next| way(one) == way(next)) {
        let (depth, threads, cores, client) = way(&group[0]);
        let in_flight = match (depth, threads) {
            (1, 1) => "One operation at a time".to_owned(),
            (depth, 1) => format!("{depth} operations in flight"),
            (1, threads) => format!("One operation at a time by each of {threads} client threads"),
            (depth, threads) => format!("{depth} operations in flight by each of {threads} client threads"),
        };
        let server = match cores {
            None => "no server: the client's own CPU does the work, in memory of this host",
            Some(Cores::Two) => "the server is on another core",
            Some(Cores::One) => "the server is on the same core",
        };
        let client = match client {
            None => "",
            Some(Client::Looks) => "the client polls for responses, ",
            Some(Client::Sleeps) => "the client sleeps until a response comes, ",
        };
        print_line!();
        print_line!("{in_flight}; {client}{server}:");
        print_line!("{}", table(group).to_string().trim_end());
    }
    Ok(())
}

/// Prints notes on how to read the tables.
pub(super) fn print_notes(
    reports: &[CompareReport],
    benchmarked: Option<u64>,
    tables: String,
    cores: usize,
) -> Done {
    print_line!();
    let general = [
        Some(
            "ops/s is the median of all rounds. 'of the better rival' is the median over the rounds of a contender's \
             rate divided by that of the better of Redis and memcached in the same round. A contender that can serve \
             other hosts is compared with rivals over TCP in the same table; one that serves a single host, also with \
             Redis's unix socket; one without a server, with the best rival of all tables with the same number of \
             operations in flight. Without a server, the server's core is free for the client, and one table shows the \
             rate of all cores."
                .to_owned(),
        ),
        Some(
            "Latencies are of one operation in 64, from its request until its value has been checked. With many \
             operations in flight, most of the latency is waiting for the others."
                .to_owned(),
        ),
        Some(
            "'in batches' is the number of batches (one, two or four) with which that rival was fastest on this \
             machine. Farside forms its batches itself."
                .to_owned(),
        ),
        is_among(reports, "lmdb").then(|| {
            "LMDB does one operation after another. Each batch has one read transaction. Values are copied out, as \
             Farside's are. The writes of a batch are committed together, and not synced to disk."
                .to_owned()
        }),
        benchmarked.map(|records| {
            format!(
                "redis-benchmark, Redis's own client, is a cross-check of ours. It requests {records} records, which \
                 all exist, and checks no value."
            )
        }),
        Some(tables),
        Some(
            "Farside's engine polls for requests for a while before it sleeps: under load it uses all of its core, \
             while Redis and memcached sleep whenever they are idle. 'server s/Mop' shows the cost in CPU time."
                .to_owned(),
        ),
        Some(
            format!(
                "Redis and memcached do more than {}: types, expiry, eviction, replication. All keys have 8 bytes; \
                 memcached's consist of letters.",
                default_kv().title
            ),
        ),
        Some(
            "shm, ring, LMDB and unix sockets serve the processes of one host, and everything was measured on one \
             host: a network would add its latency to every contender that can use one."
                .to_owned(),
        ),
        (cores == 1).then(|| {
            "This process may use only one core: tables with the server on another core are omitted.".to_owned()
        }),
    ];
    let found = [slower(reports), better_on_one_core(reports)];
    for paragraph in general.into_iter().chain(found).flatten() {
        print_line!("{}", wrapped(&paragraph));
    }
    Ok(())
}

/// Describes the sizes of the contenders' hash tables, for people.
pub(super) fn table_sizes(reports: &[CompareReport], records: u64, items: u64) -> String {
    let of_each = |bytes: u64| bytes as f64 / records as f64;
    let mut text = format!(
        "{}'s table is sized for {items} items, which takes {:.0} bytes per record. The larger the table, the fewer \
         gets need a second request; --items sets the size.",
        default_kv().title,
        of_each(our_table(items)),
    );
    if is_among(reports, "memcached") {
        text += &format!(
            " memcached's has a bucket for each item from the start, {:.0} bytes per record, and a list behind each \
             bucket.",
            of_each(memcached_table(items))
        );
    }
    if is_among(reports, "redis") {
        text += " Redis sizes its own table.";
    }
    text
}

fn is_among(reports: &[CompareReport], contender: &str) -> bool {
    reports.iter().any(|report| report.contender == contender)
}

/// Describes the setups in which Farside is slower than the better rival; `None` if there are none.
fn slower(reports: &[CompareReport]) -> Option<String> {
    let ours = reports.iter().filter(|report| report.contender.starts_with("farside"));
    let behind = ours.filter_map(|report| {
        let ratio = report.of_better_rival?.median;
        let cores = match report.cores {
            Some(Cores::One) => "on one core",
            Some(Cores::Two) => "on two cores",
            None => "without a server",
        };
        let client = match report.client {
            Some(Client::Looks) => ", polling",
            Some(Client::Sleeps) => ", sleeping",
            None => "",
        };
        let in_flight = report.depth * report.threads;
        let way = format!("{} with {in_flight} in flight {cores}{client}", report.contender);
        (ratio < 1.0).then(|| format!("{way} ({ratio:.2})"))
    });
    let behind: Vec<String> = behind.collect();
    (!behind.is_empty())
        .then(|| format!("Farside is slower than the better of Redis and memcached: {}.", behind.join("; ")))
}

/// Describes the rivals that are faster with client and server on one core than on two, with one operation at a time;
/// `None` if there are none.
fn better_on_one_core(reports: &[CompareReport]) -> Option<String> {
    let one_at_a_time = |name: &str, cores| {
        let found = reports.iter().filter(|report| report.depth == 1 && report.cores == Some(cores));
        let rates = found.filter(|report| report.contender == name).map(|report| report.ops_per_s.median);
        rates.max_by(f64::total_cmp)
    };
    let better = ["redis", "memcached"].into_iter().filter(|name| {
        let (one, two) = (one_at_a_time(name, Cores::One), one_at_a_time(name, Cores::Two));
        one.zip(two).is_some_and(|(one, two)| one > two)
    });
    let better: Vec<&str> = better.collect();
    (!better.is_empty()).then(|| {
        format!(
            "With one operation at a time, {} faster with client and server on one core than on two, since no process \
             has to be woken on another core.",
            match better[..] {
                [one] => format!("{one} is"),
                _ => format!("{} are", better.join(" and ")),
            }
        )
    })
}

/// Wraps text to lines of at most [`WIDTH`] columns, and formats it as an item of a list.
fn wrapped(text: &str) -> String {
    let mut lines = vec!["-".to_owned()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is at least one line");
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(format!("  {word}"));
        } else {
            *line = format!("{line} {word}");
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_bench::report::Spread;

    fn report(contender: &str, depth: u32, cores: Option<Cores>, rate: f64, ratio: f64) -> CompareReport {
        let spread = |median| Spread { median, min: median, max: median };
        CompareReport {
            contender: contender.into(),
            version: "1".into(),
            workload: "c".into(),
            distribution: "uniform".into(),
            records: 1,
            value_size: 1,
            threads: 1,
            depth,
            batches: None,
            cores,
            client: cores.map(|_| Client::Sleeps),
            rounds: 1,
            ops_per_s: spread(rate),
            latency_us: None,
            cpu_s_per_mop: None,
            of_better_rival: Some(spread(ratio)),
            is_cross_check: false,
        }
    }

    #[test]
    fn setups_in_which_farside_is_slower_are_listed() {
        let mut reports = vec![
            report("redis", 1, Some(Cores::One), 9.0, 0.5),
            report("farside udp", 64, Some(Cores::Two), 9.0, 1.0),
        ];
        assert_eq!(slower(&reports), None);
        reports.push(report("farside udp", 1, Some(Cores::One), 9.0, 0.424));
        let text = slower(&reports).expect("one report is slower");
        assert!(text.ends_with(": farside udp with 1 in flight on one core, sleeping (0.42)."), "{text}");
    }

    #[test]
    fn rivals_that_are_faster_on_one_core_are_named() {
        let mut reports = vec![
            report("redis", 1, Some(Cores::One), 5.0, 1.0),
            report("redis", 64, Some(Cores::Two), 9.0, 1.0),
        ];
        assert_eq!(better_on_one_core(&reports), None, "only one operation at a time counts");
        reports.push(report("redis", 1, Some(Cores::Two), 4.0, 1.0));
        assert!(better_on_one_core(&reports).expect("redis is faster").contains("redis is faster"));
        reports.push(report("redis", 1, Some(Cores::Two), 6.0, 1.0));
        assert_eq!(better_on_one_core(&reports), None, "the best setup on two cores counts");
    }

    #[test]
    fn wrapped_lines_do_not_exceed_the_width() {
        let text = "word ".repeat(100);
        let lines = wrapped(text.trim_end());
        assert!(lines.lines().all(|line| line.len() <= WIDTH) && lines.starts_with("- word"), "{lines}");
        assert!(lines.lines().skip(1).all(|line| line.starts_with("  word")), "{lines}");
    }
}
