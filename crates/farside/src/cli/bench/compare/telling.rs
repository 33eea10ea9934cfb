//! What a comparison tells people: a table for each way, and below what they must know to judge them.
//!
//! Invariant: what is said of who is faster is read off the reports, and is not said where it was not measured.

use super::our_table;
use super::servers::memcached_table;
use crate::cli::Done;
use farside_bench::compare::rows::{Client, CompareReport, Cores, table};
use farside_systems::registry::usual;

/// Columns that a paragraph has at most.
const WIDTH: usize = 112;

/// A table for each way, in the order of the reports.
pub(super) fn tell_tables(reports: &[CompareReport]) -> Done {
    let way = |report: &CompareReport| (report.depth, report.threads, report.cores, report.client);
    for group in reports.chunk_by(|one, next| way(one) == way(next)) {
        let (depth, threads, cores, client) = way(&group[0]);
        let at_once = match (depth, threads) {
            (1, 1) => "One operation at a time".to_owned(),
            (depth, 1) => format!("{depth} operations under way"),
            (1, threads) => format!("One operation at a time by each of {threads} client threads"),
            (depth, threads) => format!("{depth} operations under way by each of {threads} client threads"),
        };
        let server = match cores {
            None => "no server: the client's own CPU does it, in memory of this host",
            Some(Cores::Two) => "the server is on another core",
            Some(Cores::One) => "the server is on the same core",
        };
        let client = match client {
            None => "",
            Some(Client::Looks) => "the client looks for answers all the time, ",
            Some(Client::Sleeps) => "the client sleeps until it is answered, ",
        };
        tell!();
        tell!("{at_once}; {client}{server}:");
        tell!("{}", table(group).to_string().trim_end());
    }
    Ok(())
}

/// What a reader must know to judge the tables.
pub(super) fn tell_caveats(
    reports: &[CompareReport],
    benchmarked: Option<u64>,
    tables: String,
    cores: usize,
) -> Done {
    tell!();
    let general = [
        Some(
            "ops/s is the median of all rounds. 'of the better rival' is how many times the rate of the better of \
             Redis and memcached, in the same table and round, of which the median is told: of those over TCP for \
             whoever can serve other hosts; for whoever serves one host, of those at Redis's unix socket, too; without \
             a server, of the best of all tables with as many operations under way. Where there is no server, the core \
             that it would have is free for the client, and one table tells what all cores do."
                .to_owned(),
        ),
        Some(
            "Latencies are of one operation in 64, from when it is asked until its value was looked at. With many \
             under way that is mostly waiting for one another."
                .to_owned(),
        ),
        Some(
            "'in batches': of one, two and four, the number of batches in which that rival was fastest here. Farside \
             sees to that itself."
                .to_owned(),
        ),
        is_among(reports, "lmdb").then(|| {
            "LMDB does one operation after the other. A batch of them has one read transaction, which is renewed for \
             each batch. Values are copied out, as ours are. What a batch writes is committed together, and not \
             synchronised to a disk."
                .to_owned()
        }),
        benchmarked.map(|records| {
            format!(
                "redis-benchmark, Redis's own client, is a cross-check of ours. It asks for {records} records, which \
                 are all there, and looks at no value."
            )
        }),
        Some(tables),
        Some(
            "Farside's engine looks for requests for a while before it sleeps: while it is asked it takes all of its \
             core, where Redis and memcached sleep whenever there is nothing to do. 'server s/Mop' tells what that \
             costs."
                .to_owned(),
        ),
        Some(
            format!(
                "Redis and memcached do more than {}: types, expiry, eviction, replication. Keys have 8 bytes with \
                 everyone; memcached's are made of letters.",
                usual().title
            ),
        ),
        Some(
            "shm, ring, LMDB and unix sockets are for the processes of one host, and all of this was measured within \
             one: over a network, everyone waits for that, too."
                .to_owned(),
        ),
        (cores == 1).then(|| {
            "This process may use one core: tables with the server on another are left out.".to_owned()
        }),
    ];
    let found = [slower(reports), better_on_one_core(reports)];
    for paragraph in general.into_iter().chain(found).flatten() {
        tell!("{}", wrapped(&paragraph));
    }
    Ok(())
}

/// How large the hash tables are, of those who have one.
pub(super) fn told_tables(reports: &[CompareReport], records: u64, items: u64) -> String {
    let of_each = |bytes: u64| bytes as f64 / records as f64;
    let mut told = format!(
        "{}'s table is made for {items} items: {:.0} bytes of it for each record. The larger it is, the fewer \
         gets need a second request; --items says how large.",
        usual().title,
        of_each(our_table(items)),
    );
    if is_among(reports, "memcached") {
        told += &format!(
            " memcached's has a place for each item from the beginning, {:.0} bytes for each record, and a list behind \
             each place.",
            of_each(memcached_table(items))
        );
    }
    if is_among(reports, "redis") {
        told += " Redis makes its own.";
    }
    told
}

fn is_among(reports: &[CompareReport], contender: &str) -> bool {
    reports.iter().any(|report| report.contender == contender)
}

/// Where Farside is behind, if it is anywhere.
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
            Some(Client::Looks) => ", looking",
            Some(Client::Sleeps) => ", sleeping",
            None => "",
        };
        let under_way = report.depth * report.threads;
        let way = format!("{} with {under_way} under way {cores}{client}", report.contender);
        (ratio < 1.0).then(|| format!("{way} ({ratio:.2})"))
    });
    let behind: Vec<String> = behind.collect();
    (!behind.is_empty())
        .then(|| format!("Farside is slower than the better of Redis and memcached: {}.", behind.join("; ")))
}

/// Whether a rival that is asked for one thing at a time does better beside its client than apart from it.
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
            "One operation at a time, {} faster with client and server on one core than on two, since there nobody is \
             woken across cores.",
            match better[..] {
                [one] => format!("{one} is"),
                _ => format!("{} are", better.join(" and ")),
            }
        )
    })
}

/// The words in lines of at most [`WIDTH`] columns, as an item of a list.
fn wrapped(text: &str) -> String {
    let mut lines = vec!["-".to_owned()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a first line");
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
    fn it_is_told_where_farside_is_behind_and_only_there() {
        let mut reports = vec![
            report("redis", 1, Some(Cores::One), 9.0, 0.5),
            report("farside udp", 64, Some(Cores::Two), 9.0, 1.0),
        ];
        assert_eq!(slower(&reports), None);
        reports.push(report("farside udp", 1, Some(Cores::One), 9.0, 0.424));
        let told = slower(&reports).expect("it is behind once");
        assert!(told.ends_with(": farside udp with 1 under way on one core, sleeping (0.42)."), "{told}");
    }

    #[test]
    fn rivals_that_are_better_on_one_core_are_named() {
        let mut reports = vec![
            report("redis", 1, Some(Cores::One), 5.0, 1.0),
            report("redis", 64, Some(Cores::Two), 9.0, 1.0),
        ];
        assert_eq!(better_on_one_core(&reports), None, "with many under way it is another matter");
        reports.push(report("redis", 1, Some(Cores::Two), 4.0, 1.0));
        assert!(better_on_one_core(&reports).expect("it is").contains("redis is faster"));
        reports.push(report("redis", 1, Some(Cores::Two), 6.0, 1.0));
        assert_eq!(better_on_one_core(&reports), None, "the best way on two cores counts");
    }

    #[test]
    fn lines_are_no_longer_than_they_may_be() {
        let text = "word ".repeat(100);
        let lines = wrapped(text.trim_end());
        assert!(lines.lines().all(|line| line.len() <= WIDTH) && lines.starts_with("- word"), "{lines}");
        assert!(lines.lines().skip(1).all(|line| line.starts_with("  word")), "{lines}");
    }
}
