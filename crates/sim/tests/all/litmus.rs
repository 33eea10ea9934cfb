//! Tests of the enumerator of outcomes against a machine that shares no code with it, and of the comparison against
//! flawed machines.

use std::collections::BTreeSet;

use crate::support::machine::{self, Flaw};
use farside_sim::litmus::{Program, Seeds, Summary, compare, compare_all, programs};

fn parsed(text: &str) -> Program {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn allowed(text: &str, relaxed: bool) -> Vec<String> {
    let program = parsed(text);
    program.allowed(relaxed).iter().map(|outcome| program.text_of(outcome)).collect()
}

#[test]
fn over_a_thousand_distinct_programs_of_bounded_size_exist() {
    let programs = programs();
    let texts: BTreeSet<String> = programs.iter().map(Program::to_string).collect();
    assert_eq!(texts.len(), programs.len());
    let names: BTreeSet<&str> = programs.iter().map(Program::name).collect();
    let sizes: Vec<usize> = programs.iter().map(|program| program.allowed(false).len()).collect();
    let (largest, all) = (sizes.iter().max().unwrap(), sizes.iter().sum::<usize>());
    println!(
        "{} programs of {} shapes, {all} outcomes, at most {largest} a program",
        programs.len(),
        names.len()
    );
    assert!(programs.len() >= 1_000 && *largest <= 256);
    assert_eq!(programs[0].name(), "message passing");
    assert!(names.contains("two ordered reads") && names.contains("drawn"), "no named shape is too large");
}

#[test]
fn a_printed_program_is_parsed_back() {
    for program in programs() {
        let again = parsed(&program.to_string());
        assert_eq!(again.to_string(), program.to_string());
        assert_eq!((again.actors(), again.memory()), (program.actors(), program.memory()));
    }
    let texts = [
        "{x[0]=1,y=2} A: WRITE y-w=1; fence FAA x[0]-1 | B: CAS x[0] 0->1; wait READ x[7]-y[3] | C: READ z[3-5]",
        "A: fence CAS x[1] 2->1 &3/1 | B: CAS y[0] 0->1 &18446744073709551615/1",
    ];
    texts.iter().for_each(|text| assert_eq!(parsed(text).to_string(), *text));
}

#[test]
fn an_invalid_program_is_refused_with_a_remedy() {
    let refusals = [
        ("", "'': start the actor with 'A:'"),
        ("A: READ x | A: READ x", "'A: READ x': start the actor with 'B:'"),
        ("A: JUMP x", "'JUMP x': write READ x, WRITE x=1, CAS x[0] 0->1 or FAA x[0]+1"),
        ("A:", "'': write READ x"),
        ("A: READ q", "'q': write a place, as in x, x[3], x[3-5], x-z or x[7]-y[0], in lines xyzw"),
        ("A: READ z-x", "'z-x': write a place"),
        ("A: READ x[8]", "'x[8]': write a place"),
        ("A: READ x-w", "a verb of A touches 4 lines: use at most 3"),
        ("A: WRITE x=1,z=1", "'WRITE x=1,z=1': write adjacent places, in order"),
        ("A: WRITE x", "'x': write a place and a value, as in x=1"),
        ("A: FAA x+1", "'x': write one word, as in x[0]"),
        ("A: CAS x[0] 0->1 3/1", "'CAS x[0] 0->1 3/1': write"),
        ("A: CAS x[0] 0->1 &3/b", "'b': write a number below 2^64"),
        ("A: FAA x[0]+a", "'a': write a number below 2^64"),
        ("A: READ x; READ x; READ x; READ x; READ x", "A has 5 verbs: write 1 to 4"),
        ("A: READ x | B: READ x | C: READ x | D: READ x", "4 actors: write 1 to 3"),
        ("{x=1 A: READ x", "'{' without '}': close the initial memory"),
    ];
    for (text, expected) in refusals {
        let said = text.parse::<Program>().unwrap_err().to_string();
        assert!(said.starts_with(expected), "{text}: {said}");
    }
}

#[test]
fn allowed_outcomes_match_the_literature() {
    let stale = "B: READ y=1; READ x=0 | memory x=1 y=1".to_owned();
    assert!(!allowed("A: WRITE x=1; WRITE y=1 | B: READ y; wait READ x", false).contains(&stale));
    assert!(!allowed("A: WRITE x=1; WRITE y=1 | B: READ y; fence READ x", false).contains(&stale));
    assert!(
        allowed("A: WRITE x=1; WRITE y=1 | B: READ y; READ x", false).contains(&stale),
        "READ to READ is unordered"
    );
    assert!(!allowed("A: WRITE x-y=1 | B: READ y; wait READ x", false).contains(&stale));
    assert!(allowed("A: WRITE x-y=1 | B: READ y; wait READ x", true).contains(&stale), "relaxed ordering");

    let torn = allowed("A: WRITE x-y=1 | B: READ x-y", false);
    assert_eq!(torn.len(), 4, "either line old or new: {torn:?}");
    let lost = allowed("A: FAA x[0]+1 | B: WRITE x[0]=5", false);
    let ends: Vec<&str> = lost.iter().map(|text| text.split(" memory ").nth(1).unwrap()).collect();
    assert_eq!(
        ends,
        ["x[0]=1 x[1-7]=0", "x[0]=5 x[1-7]=0", "x[0]=6 x[1-7]=0"],
        "in the first, the WRITE is lost"
    );
    assert_eq!(allowed("A: CAS x[0] 7->1 | B: WRITE x[0]=5", false).len(), 2, "a failed CAS loses nothing");
    let bit = allowed("A: CAS x[0] 0->1 &1/1 | B: WRITE x[0]=6", false);
    let ends: Vec<&str> = bit.iter().map(|text| text.split(" | memory ").nth(1).unwrap()).collect();
    assert_eq!(
        ends,
        ["x[0]=1 x[1-7]=0", "x[0]=6 x[1-7]=0", "x[0]=7 x[1-7]=0"],
        "in the first, a CAS of one bit has lost the WRITE of the others"
    );
    assert_eq!(
        allowed("A: FAA x[0]+1 | B: FAA x[0]+2", false),
        [
            "A: FAA x[0] was 0 | B: FAA x[0] was 1 | memory x[0]=3 x[1-7]=0",
            "A: FAA x[0] was 2 | B: FAA x[0] was 0 | memory x[0]=3 x[1-7]=0"
        ]
    );
    let stuck = allowed("{x[0]=1} A: WRITE x[0]=0 | B: FAA x[0]+1; wait FAA x[0]-1", false);
    assert!(
        stuck.iter().any(|text| text.ends_with("memory x[0]=1 x[1-7]=0")),
        "unlock by WRITE under FAA: {stuck:?}"
    );
    let under = allowed("{x[0]=1} A: WRITE x[0]=0 | B: FAA x[0]+1; wait FAA x[0]-1", false);
    assert!(
        under.iter().any(|text| text.ends_with("memory x[0]=-1 x[1-7]=0")),
        "and its underflow: {under:?}"
    );
}

/// Numbers of seeds for a correct machine. The machine reaches the rarest outcome after about 100,000 seeds.
const MANY: Seeds = Seeds { at_least: 100, at_most: 1_000_000 };

fn reaches_exactly(relaxed: bool, flaw: Flaw) -> Summary {
    let summary = compare_all(&programs(), relaxed, MANY, |program, seed| machine::run(program, seed, flaw));
    summary.unwrap_or_else(|forbidden| panic!("{forbidden}"))
}

#[test]
fn a_correct_machine_reaches_exactly_the_allowed_outcomes() {
    let summary = reaches_exactly(false, Flaw::None);
    println!("{summary}");
    assert_eq!(summary.unreached, []);
}

#[test]
fn a_relaxed_machine_reaches_exactly_the_allowed_outcomes() {
    let summary = reaches_exactly(true, Flaw::WriteLinesInAnyOrder);
    println!("{summary}");
    assert_eq!(summary.unreached, []);
}

#[test]
fn a_forbidden_outcome_is_reported_with_program_and_seed() {
    let program = programs().swap_remove(0);
    let run = |program: &Program, seed| machine::run(program, seed, Flaw::WritesPassWrites);
    let forbidden = compare(&program, false, Seeds { at_least: 10_000, at_most: 0 }, run).unwrap_err();
    let text = forbidden.to_string();
    assert_eq!(
        text,
        format!(
            "forbidden outcome of 'message passing', by seed {}\n  A: WRITE x=1; WRITE y=1 | B: READ y; wait READ x\n  \
             B: READ y=1; READ x=0 | memory x=1 y=1\n  (3 are allowed)",
            forbidden.seed
        )
    );
    let again = run(&program, forbidden.seed);
    assert_eq!(program.text_of(&again), forbidden.outcome, "the seed replays it");
}

#[test]
fn every_too_weak_flaw_reaches_a_forbidden_outcome() {
    let programs = programs();
    for flaw in [
        Flaw::WriteLinesInAnyOrder,
        Flaw::WritesPassWrites,
        Flaw::ReadsPassWrites,
        Flaw::AtomicsPassWrites,
        Flaw::ReadsPassAtomics,
        Flaw::AtomicsOverlap,
        Flaw::FencesAreIgnored,
        Flaw::FencesHoldOnlyThemselves,
        Flaw::WaitsAreIgnored,
        Flaw::FailedCasWritesBack,
        Flaw::LinesAreTorn,
        Flaw::MaskedSwapKeepsOtherBits,
    ] {
        let found = compare_all(&programs, false, Seeds { at_least: 300, at_most: 0 }, |program, seed| {
            machine::run(program, seed, flaw)
        });
        let forbidden = found.expect_err(&format!("{flaw:?} was not detected"));
        println!("{flaw:?}: {forbidden}");
    }
}

#[test]
fn every_too_strong_flaw_misses_an_allowed_outcome() {
    let programs = programs();
    for flaw in [
        Flaw::ReadLinesAscend,
        Flaw::ReadsAreWhole,
        Flaw::WritesAreWhole,
        Flaw::ReadsKeepTheirOrder,
        Flaw::AtomicsKeepTheirOrder,
        Flaw::ReadsHoldWrites,
        Flaw::AtomicsAreWhole,
        Flaw::AtomicsExcludeWordsBeside,
        Flaw::OneVerbAtATime,
    ] {
        // The flawed machine must miss an outcome that the correct machine reaches with the same number of seeds.
        let mut missed = 0;
        for program in programs.iter().filter(|program| program.allowed(false).len() <= 12) {
            let run = |flaw| {
                compare(program, false, Seeds { at_least: 0, at_most: 1_000 }, |program, seed| {
                    machine::run(program, seed, flaw)
                })
            };
            let coverage =
                run(flaw).unwrap_or_else(|forbidden| panic!("{flaw:?} is only too strong: {forbidden}"));
            if !coverage.unreached.is_empty() && run(Flaw::None).is_ok_and(|good| good.unreached.is_empty()) {
                missed += 1;
                break;
            }
        }
        assert!(missed > 0, "{flaw:?} was not detected");
    }
}
