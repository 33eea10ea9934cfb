//! Tests of the predictions of FaSST's transactions on machines that are nodes and clients at once.

use farside_bench::oltp::objects::{self, Objects};
use farside_bench::oltp::smallbank::SmallBank;
use farside_bench::oltp::tatp::Tatp;
use farside_bench::oltp::{Benchmark, Kind};
use farside_bench::workload::Distribution;
use farside_predict::oltp::{Bed, Load, Measured};
use farside_sim::hardware::{CIB, CX3, Inputs};

fn measured<B: Benchmark + 'static>(load: Load, benchmark: B) -> Measured {
    let begun = std::time::Instant::now();
    let bed = Bed::new(load, benchmark, 1).expect("the store is created");
    let measured = bed.measure(1_000).expect("nothing fails");
    bed.audit().expect("the rows add up");
    println!("{:?}: {measured:?}", begun.elapsed());
    measured
}

fn objects(keys: usize, write_share: f64) -> Objects {
    let distribution = Distribution::Uniform;
    Objects::new(objects::Plan { objects: 2_000, len: 40, keys, write_share, distribution })
        .expect("it is possible")
}

/// A single task of each of three machines, which seldom meet.
const fn few(backups: u8) -> Load {
    Load { threads: 1, tasks: 1, backups, ..Load::paper(CIB, 3) }
}

/// A read of one object is one call. An update of one object takes one call to lock and get it, three to the logs, two
/// to the backups and one to the primary.
#[test]
fn a_transaction_takes_the_packets_and_the_round_trips_of_its_phases() {
    let Inputs { verb_ns, two_sided_ns, core_message_ns, .. } = CIB.inputs;
    let call_us = (verb_ns + two_sided_ns + core_message_ns) as f64 / 1e3;
    for (backups, write_share, packets, trips) in [(2, 0.0, 1.0, 1.0), (2, 1.0, 7.0, 4.0), (0, 1.0, 3.0, 3.0)]
    {
        let one = measured(few(backups), objects(1, write_share));
        assert!((one.packets - packets).abs() < 0.1, "{} packets, not {packets}", one.packets);
        // The rest is the time of the parts of the machines, and of other transactions.
        let over = one.mean_us / call_us - trips;
        assert!((0.0..0.5 * trips).contains(&over), "{} us for {trips} trips of {call_us} us", one.mean_us);
    }
}

#[test]
fn backups_cost_packets_and_lower_the_rate() {
    let [none, two] = [0, 2].map(|backups| {
        let load = Load { threads: 2, tasks: 8, backups, ..Load::paper(CX3, 3) };
        measured(load, objects(2, 0.5))
    });
    assert!(two.packets > none.packets + 2.0, "{} and {}", none.packets, two.packets);
    assert!(two.ops_per_s < 0.9 * none.ops_per_s, "{} and {}", none.ops_per_s, two.ops_per_s);
}

#[test]
fn smallbank_and_tatp_have_their_kinds_and_rates_of_success() {
    let load = Load { threads: 2, tasks: 8, ..Load::paper(CX3, 3) };
    let bank = measured(load, SmallBank::new(12_000).expect("it is possible"));
    assert_eq!(bank.kinds.len(), 6, "{:?}", bank.kinds);
    assert!(bank.abort_rate < 0.3 && bank.ops_per_s > 1e4, "{bank:?}");
    let tatp = measured(load, Tatp::new(3_000).expect("it is possible"));
    let of = |name: &str| -> Kind { tatp.kinds.iter().find(|(kind, _)| *kind == name).expect("it ran").1 };
    assert!((of("get access data").success_rate() - 0.625).abs() < 0.1, "{:?}", tatp.kinds);
    assert!(tatp.successes_per_s < tatp.ops_per_s && tatp.ops_per_s > bank.ops_per_s, "{tatp:?}");
}

/// TATP as in the figures.
fn tatp(load: Load) -> Measured {
    let machines = u64::from(load.machines);
    let tatp = Tatp::folded(5_000 * machines, Tatp::SUBSCRIBERS * machines).expect("it is possible");
    let measured = Bed::new(load, tatp, 1).and_then(|bed| bed.measure(1_000)).expect("nothing fails");
    println!("{} on {machines} machines: {measured:?}", load.cluster.name);
    measured
}

/// SmallBank with this number of accounts for each thread.
fn smallbank(load: Load, accounts: u64) -> Measured {
    let bank = SmallBank::new(accounts * u64::from(load.machines * load.threads)).expect("it is possible");
    let measured = Bed::new(load, bank, 1).and_then(|bed| bed.measure(1_000)).expect("nothing fails");
    println!("{}, {accounts} accounts: {measured:?}", load.cluster.name);
    measured
}

/// Rates with faster parts of the machines, without backups, and with more tasks: experiments for the guide.
#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_the_unit_of_cx3_limits_its_transactions() {
    let load = Load::paper(CX3, 6);
    let with = |change: fn(&mut Inputs)| {
        let mut cluster = CX3;
        change(&mut cluster.inputs);
        Load { cluster, ..load }
    };
    let faster = [
        with(|_| ()),
        with(|inputs| inputs.nic_op_ps /= 2),
        with(|inputs| inputs.core_message_ns /= 2),
        with(|inputs| inputs.core_access_ns = 0),
        Load { backups: 0, ..load },
        Load { tasks: 38, ..load },
    ];
    let [usual, nic, cores, ..] = faster.map(tatp).map(|measured| measured.ops_per_s);
    assert!(nic > 1.2 * usual && cores < 1.1 * usual, "{usual}, {nic} and {cores}");
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_fewer_accounts_meet_more_often() {
    for cluster in [CX3, CIB] {
        let [few, some, many] =
            [3_000, 12_500, 50_000].map(|accounts| smallbank(Load::paper(cluster, 6), accounts));
        assert!(few.abort_rate > some.abort_rate && some.abort_rate > many.abort_rate);
    }
}

/// The time that a transaction takes on each machine differs from that of a large cluster by a term that is inversely
/// proportional to the number of machines.
#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_the_rate_of_more_machines_is_extrapolated() {
    let [of_12, of_24, of_48] = [12, 24, 48].map(|machines| 1.0 / tatp(Load::paper(CX3, machines)).ops_per_s);
    let extrapolated = of_24 + (of_24 - of_12) / 2.0;
    assert!((extrapolated / of_48 - 1.0).abs() < 0.03, "{extrapolated} and {of_48} s for a transaction");
}

#[test]
fn impossible_loads_are_refused() {
    let bank = || SmallBank::new(10).expect("it is possible");
    for load in [Load::paper(CIB, 1), Load { threads: 15, ..Load::paper(CIB, 3) }] {
        let refused = Bed::new(load, bank(), 1).err().expect("there is no such load");
        assert!(refused.contains("2 machines or more"), "{refused}");
    }
}
