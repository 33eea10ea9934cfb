//! Tests of values, kills files, replay commands, panics within a trial, trials of stores with several members, and
//! trials of guarded objects, of ABDLOCK, of stores with logs and of transactions, and of protocols that `tear`
//! searches.

mod abd_lock;
mod blocks;
mod btree;
mod chequer;
mod epochs;
mod guarded;
mod index;
#[cfg(farside_mutants)]
mod killed;
mod latch;
mod members;
mod sharded;
mod stamps;
mod tear;
mod txn;

use farside_sim::fault::Fault;
use farside_sim::history::register::Value;
use farside_trial::judge::{Verdict, caught, judge, replay};
use farside_trial::values::{bytes, known};
use farside_trial::{Carrier, Setup, System, kills};

fn prism_kv() -> System {
    System::named("prism-kv").expect("prism-kv can be tried")
}

#[test]
fn a_mixture_of_two_values_is_no_value() {
    let [one, other] = [Value { tag: 7, len: 100 }, Value { tag: 8, len: 100 }];
    assert_eq!(known(&bytes(one)), Some(one));
    let mut torn = bytes(one);
    torn[64..].copy_from_slice(&bytes(other)[64..]);
    assert_eq!(known(&torn), None);
    assert_eq!((known(&[1, 2]), known(&bytes(one)[..99])), (None, None));
}

#[test]
fn a_line_of_a_kills_file_is_a_mutant_and_a_seed() {
    let text = "# why\nKvNoGeneration 12\n\n  NoClamp  3\n";
    let expected = [("KvNoGeneration".to_owned(), 12), ("NoClamp".to_owned(), 3)];
    assert_eq!(kills::parse(text), Ok(expected.to_vec()));
    assert!(kills::parse("NoClamp").is_err() && kills::parse("NoClamp x").is_err());
}

#[test]
fn a_replay_command_has_a_flag_for_each_fixed_value() {
    let mut setup = Setup::of(prism_kv());
    assert_eq!(replay(&setup, 7), "farside sim --system prism-kv --seed 7");
    setup.carrier = Some(Carrier::Datagrams);
    (setup.clients, setup.keys, setup.operations) = (Some(3), Some(1), Some(90));
    setup.faults = vec![Fault::Loss, Fault::OneWayPartition];
    let all = "farside sim --system prism-kv --carrier datagrams --clients 3 --keys 1 --operations 90 \
               --faults loss,one-way --seed 7";
    assert_eq!(replay(&setup, 7), all);
    setup.faults.clear();
    assert!(replay(&setup, 7).contains("--faults none"));
}

#[test]
fn a_panic_is_caught_with_its_place_and_the_next_trial_runs() {
    let reported = caught(|| panic!("two parts in one step")).expect_err("it panics");
    assert!(reported.starts_with("two parts in one step (") && reported.contains("main.rs:"), "{reported}");
    assert_eq!(caught(|| 7), Ok(7));
    assert_eq!(judge(&Setup::of(prism_kv()), 1, true).verdict, Verdict::Good);
}
