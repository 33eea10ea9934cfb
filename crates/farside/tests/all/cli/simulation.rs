//! `sim`: its reports, the determinism of a seed, and its refusals.

use crate::support::{Ran, farside};
use farside_sim::history::lines;
use farside_sim::history::register::Ask;
use std::io::BufReader;

/// Returns the text after `name` on the output line that starts with `name`.
#[track_caller]
fn reported<'a>(ran: &'a Ran, name: &str) -> &'a str {
    let line = ran.text().lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {}", ran.text())).trim()
}

#[test]
fn a_seed_gives_the_same_run_in_every_mode() {
    let one = farside(["sim", "--seed", "7", "--check"]).done();
    assert_eq!(reported(&one, "verdict"), "good: every key was linearizable");
    let json = farside(["sim", "--seed", "7", "--json"]).done().json();
    assert_eq!(json["digest"], reported(&one, "digest"));
    assert_eq!((&json["verdict"], &json["seed"]), (&"good".into(), &7.into()));
    let many = farside(["sim", "--seeds", "6..8", "--json"]).done();
    let lines: Vec<serde_json::Value> =
        many.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.len(), 3, "both ends are included");
    assert_eq!(lines[1], json);
    let replay = json["replay"].as_str().expect("a command").split(' ').skip(1);
    assert_eq!(reported(&farside(replay).done(), "digest"), reported(&one, "digest"));
}

#[test]
fn given_settings_are_not_drawn() {
    let asked = [
        "--carrier",
        "connections",
        "--clients",
        "3",
        "--keys",
        "2",
        "--operations",
        "90",
        "--faults",
        "reset,delay",
        "--json",
    ];
    let many = farside(["sim", "--seeds", "1..12"].iter().chain(&asked)).done();
    let mut strikes = 0;
    for line in many.text().lines() {
        let run: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let drawn = &run["drawn"];
        assert_eq!((&drawn["carrier"], &drawn["clients"]), (&"connections".into(), &3.into()));
        assert_eq!((&drawn["keys"], &drawn["operations"]), (&2.into(), &90.into()));
        let struck = run["struck"].as_object().expect("an object");
        assert_eq!(struck.keys().collect::<Vec<_>>(), ["delay", "reset"]);
        strikes += struck.values().filter_map(serde_json::Value::as_u64).sum::<u64>();
        let replay = run["replay"].as_str().expect("a command").split(' ').skip(1).chain(["--json"]);
        assert_eq!(farside(replay).done().json(), run, "the replay gives the same run");
    }
    assert!(strikes > 0, "at least one fault struck");
}

/// A single client with a fault in every sixth operation mostly waits, so the run needs much virtual time.
#[test]
fn a_long_run_has_enough_virtual_time() {
    let slow = ["sim", "--system", "pilaf", "--clients", "1", "--seed", "23", "--operations"];
    farside(slow.iter().chain(&["3000"])).done();
    farside(slow.iter().chain(&["5001"])).refused("5001 is not in 1..=5000");
}

#[test]
fn many_seeds_are_summed_up_in_totals() {
    let many = farside(["sim", "--seeds", "1..5", "--faults", "none"]).done();
    assert!(many.text().starts_with("5 seeds of prism-kv in "), "{}", many.text());
    assert_eq!(reported(&many, "faults"), "none");
    assert_eq!(reported(&many, "verdict"), "good: every key was linearizable");
}

#[test]
fn an_unchecked_run_is_not_called_good() {
    let unchecked = farside(["sim", "--seed", "7", "--no-check"]).done();
    assert!(reported(&unchecked, "verdict").starts_with("not checked: "), "{}", unchecked.text());
    let many = farside(["sim", "--seeds", "7..8", "--no-check"]).done();
    assert!(reported(&many, "verdict").starts_with("not checked: "), "{}", many.text());
}

#[test]
fn a_written_history_can_be_read_and_has_the_runs_digest() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("history.jsonl");
    let picture = folder.path().join("picture.svg");
    let run = farside(
        ["sim", "--seed", "7", "--history", path.to_str().expect("UTF-8"), "--picture"]
            .into_iter()
            .chain([picture.to_str().expect("UTF-8")]),
    )
    .done();
    let file = BufReader::new(std::fs::File::open(&path).expect("it was written"));
    let history = lines::read::<Ask>(file).expect("it is well-formed");
    assert_eq!(format!("{:016x}", history.digest()), reported(&run, "digest"), "the history is the run's");
    assert!(run.err.contains("no picture written") && !picture.exists(), "{}", run.err);
}
