//! Every op in every shape matches the model: statuses, outputs, and all of memory afterwards.

use crate::support::cases::{Comparison, Shape, enumerate};
use crate::support::model::{OpSpec, Right, Verb};
use farside_remote::Status;
use farside_remote::draws::Draws;
use proptest::prelude::any;
use proptest::test_runner::{Config, TestRunner};
use std::cell::RefCell;

#[test]
fn every_op_in_every_shape_matches_the_model() {
    let mut comparison = Comparison::new();
    let shapes = Shape::all();
    let outcomes = enumerate(&mut comparison, &shapes, 160, 800);
    println!(
        "{} shapes, {} chains, {} ops compared, each run as built, as decoded, and by the model",
        shapes.len(),
        comparison.tally.chains,
        comparison.tally.ops
    );
    for verb in Verb::ALL {
        let seen: Vec<(Status, u64)> =
            Status::ALL.map(|status| (status, comparison.tally.saw(verb, status))).into();
        println!("{verb:?}: {seen:?}");
        for (status, times) in seen {
            assert_eq!(times > 0, reachable(verb, status), "{verb:?} ended with {status:?} {times} times");
        }
    }
    println!("retired: {:?}", comparison.tally.retired);
    assert_eq!(comparison.tally.retired.len(), 3, "buffers were retired for each of three reasons");
    for (shape, seen) in shapes.iter().zip(&outcomes) {
        assert!(seen.contains(&Status::Ok), "never successful: {shape:?}");
        assert!(!shape.conditional || seen.contains(&Status::Skipped), "never skipped: {shape:?}");
        let may_fail = shape.verb == Verb::Cas;
        assert!(!may_fail || seen.contains(&Status::CasFailed), "always swapped: {shape:?}");
    }
}

#[test]
fn every_op_matches_the_model_under_every_set_of_rights() {
    const TIMES: u64 = 6;
    let mut comparison = Comparison::new();
    let (shapes, sets) = (Shape::all(), Right::sets());
    for (index, &shape) in shapes.iter().enumerate() {
        for (number, rights) in sets.iter().enumerate() {
            let mut refused = false;
            for draw in 0..TIMES {
                let mut random = Draws((index as u64) << 32 | (number as u64) << 16 | draw);
                comparison.reset();
                comparison.limit_rights(rights);
                let mut specs = Vec::new();
                comparison.draw(&mut random, shape, &mut specs);
                specs.push(OpSpec { at: 1 << 63, len: 32, ..OpSpec::default() });
                let key = comparison.draw_key(&mut random);
                let statuses = comparison.run(key, &specs);
                // The refused op may be the drawn op, or an op that prepares it.
                refused |= statuses.contains(&Status::Access);
            }
            assert!(refused || !rights.is_empty(), "{shape:?} without any right");
        }
    }
    comparison.compare_everything("at the end");
    println!(
        "{} shapes under {} sets of rights, {} chains",
        shapes.len(),
        sets.len(),
        comparison.tally.chains
    );
    for verb in Verb::ALL {
        let (ok, refused) =
            (comparison.tally.saw(verb, Status::Ok), comparison.tally.saw(verb, Status::Access));
        println!("{verb:?}: {ok} OK, {refused} refused for access");
        assert!(ok > 0 && refused > 0);
    }
}

/// Whether an op of verb `verb` can have the status `status`.
fn reachable(verb: Verb, status: Status) -> bool {
    match status {
        Status::Ok | Status::Skipped | Status::Aborted | Status::NotReady | Status::Access => true,
        Status::Invalid => verb != Verb::Retire,
        Status::CasFailed => verb == Verb::Cas,
        Status::NullPointer => matches!(verb, Verb::Read | Verb::Write | Verb::Cas),
        Status::TooLong => !matches!(verb, Verb::Write | Verb::Retire),
    }
}

#[test]
fn random_chains_match_the_model() {
    let config = Config { cases: 20_000, failure_persistence: None, ..Config::default() };
    let shapes = Shape::all();
    let comparison = RefCell::new(Comparison::new());
    let chains = (proptest::collection::vec(any::<u64>(), 1..=8), any::<u64>());
    let done = TestRunner::new(config).run(&chains, |(seeds, key_seed)| {
        let mut comparison = comparison.borrow_mut();
        comparison.reset();
        let mut specs = Vec::new();
        for &seed in &seeds {
            let mut random = Draws(seed);
            // Draw the verb first, then a shape of this verb, since most shapes are of CAS.
            let verb = random.pick(&Verb::ALL);
            let of_verb: Vec<&Shape> = shapes.iter().filter(|shape| shape.verb == verb).collect();
            let shape = *random.pick(&of_verb);
            comparison.draw(&mut random, shape, &mut specs);
        }
        let key = comparison.draw_key(&mut Draws(key_seed));
        comparison.run(key, &specs);
        Ok(())
    });
    if let Err(failure) = done {
        panic!("{failure}");
    }
    let tally = &comparison.borrow().tally;
    println!("{} random chains, {} ops compared", tally.chains, tally.ops);
    assert!(tally.chains >= 20_000);
}
