//! Tests of the predictions of ordered indexes, and of calls and READs. Predictions of other systems are tested with
//! the papers' figures.

mod calls;
mod oltp;

use farside_bench::index::NameKind;
use farside_predict::index::{Bed, Load, Measured, Mix, Ranks};
use farside_sim::hardware::{CONNECTX_6, Inputs, Testbed};
use farside_systems::index::{Indexing, Rung, Versions};
use farside_systems::system::Options;

/// A small index on four compute nodes and two memory nodes, whose caches have room for all inner nodes.
const LOAD: Load = Load {
    system: "smart",
    indexing: Indexing { redo: Some(false), ..Indexing::NONE },
    options: Options::NONE,
    testbed: Testbed { machines: 4, ..Testbed::SMART },
    inputs: CONNECTX_6,
    members: 2,
    clients_max: 96,
    coroutines: 2,
    keys: NameKind::Numbers,
    key_padding: 0,
    value_len: 8,
    records: 1_500,
    ranks: 60_000_000,
    cache_bytes: 60_000_000_000,
    warm_up: 12_000,
    skew: 0.99,
    is_ordered: false,
    mix: Mix::C,
};

fn measured(load: Load, clients: u32, operations: u64) -> Measured {
    Bed::new(load, 1).and_then(|bed| bed.measure(clients, operations)).expect("nothing fails")
}

#[test]
fn a_reader_alone_takes_one_read_and_its_latency() {
    let load = Load { coroutines: 1, skew: 0.0, ..LOAD };
    let alone = measured(load, 1, 300);
    println!("{alone:?}");
    let verb_us =
        (CONNECTX_6.verb_ns + CONNECTX_6.pcie_ns + Testbed::SMART.distance.round_trip_ns()) as f64 / 1e3;
    assert!((alone.mean_us / verb_us - 1.0).abs() < 0.05, "{} us, and a READ takes {verb_us}", alone.mean_us);
    assert!((alone.nic_ops - 1.0).abs() < 0.02, "{} ops", alone.nic_ops);
    assert!(alone.leaf_share() > 0.98, "{}", alone.leaf_share());
}

/// The NIC of the memory node starts 45 million ops a second. Only reads that share a READ are faster.
#[test]
fn the_nic_limits_reads_unless_they_are_delegated() {
    let load = Load { members: 1, clients_max: 256, ..LOAD };
    let on = |rung| measured(Load { indexing: Indexing { rung, ..LOAD.indexing }, ..load }, 256, 6_000);
    let [apart, delegated] = [Some(Rung::EmbeddedLock), None].map(on);
    let mops = |measured: &Measured| measured.ops_per_s / 1e6;
    println!("{:.1} and {:.1} M/s, {apart:?}", mops(&apart), mops(&delegated));
    assert!(apart.busy.ops > 0.98 && apart.busy.link < 0.8, "{:?}", apart.busy);
    assert!(apart.nic_ops * mops(&apart) < 45.1, "{} ops at {} M/s", apart.nic_ops, mops(&apart));
    assert!(apart.counted("reads delegated") == 0.0 && delegated.counted("reads delegated") > 0.05);
    assert!(mops(&delegated) > 45.1, "{} M/s", mops(&delegated));
}

/// An update reads the leaf, locks it with a note for its recovery and reads it again, and writes it. A redo record is
/// one op more. The NIC that takes a list as one op starts three.
#[test]
fn an_update_alone_takes_five_ops_in_three_lists() {
    let load = Load { coroutines: 1, skew: 0.0, mix: Mix::of_reads(0.0), ..LOAD };
    let with_redo = Load { indexing: Indexing { redo: Some(true), ..load.indexing }, ..load };
    let of_lists = Load { inputs: Inputs { lists_are_ops: true, ..CONNECTX_6 }, ..load };
    for (load, ops) in [(load, 5.0), (with_redo, 6.0), (of_lists, 3.0)] {
        let alone = measured(load, 1, 300);
        println!("{alone:?}");
        assert!((alone.nic_ops - ops).abs() < 0.1, "{} ops, and not {ops}", alone.nic_ops);
        assert!((alone.lists - 3.0).abs() < 0.05, "{} lists", alone.lists);
        assert!((8.0..11.0).contains(&alone.mean_us), "{} us", alone.mean_us);
    }
}

/// Sherman's update takes the lock, reads the leaf, and writes an entry and the free lock. Its reads fill the links.
#[test]
fn the_links_limit_sherman_whose_update_takes_four_ops_in_three_lists() {
    let versions = Some(Versions { line: 64, bits: 8 });
    let load = Load { system: "sherman", indexing: Indexing { versions, ..LOAD.indexing }, ..LOAD };
    let mut bed = Bed::new(Load { coroutines: 1, skew: 0.0, ..load }, 1).expect("nothing fails");
    let get = bed.measure(1, 300).expect("nothing fails");
    bed.set_mix(Mix::of_reads(0.0)).expect("nothing fails");
    let update = bed.measure(1, 300).expect("nothing fails");
    println!("{get:?}, {update:?}");
    assert!((get.nic_ops - 1.0).abs() < 0.02 && (get.lists - 1.0).abs() < 0.02, "{get:?}");
    assert!((update.nic_ops - 4.0).abs() < 0.1 && (update.lists - 3.0).abs() < 0.05, "{update:?}");
    let reads = measured(Load { members: 1, clients_max: 256, ..load }, 256, 4_000);
    assert!(reads.busy.link > 0.95 && reads.busy.ops < 0.5, "{:?}", reads.busy);
}

/// The index is opened anew for another cache, and has all its records. A larger cache saves READs, and the former one
/// has the former rate.
#[test]
fn one_bed_measures_caches_of_several_sizes() {
    for system in ["smart", "art", "sherman"] {
        let mut bed = Bed::new(Load { system, ..LOAD }, 1).expect("nothing fails");
        let mut of_cache = |cache_bytes| {
            bed.set_cache(cache_bytes).expect("nothing fails");
            bed.measure(32, 1_000).expect("nothing fails").nic_ops
        };
        let [all, half, none] = [LOAD.cache_bytes, 300_000_000, 0].map(&mut of_cache);
        let again = of_cache(LOAD.cache_bytes);
        println!("{system}: {all}, {half} and {none} ops of a get, then {again}");
        assert!(all < 1.05 && half > 0.99 * all && none > 1.5 * half, "{system}: {all}, {half}, {none} ops");
        assert!((again / all - 1.0).abs() < 0.02, "{system}: {again} ops, and at first {all}");
    }
}

#[test]
fn scans_and_insertions_are_checked_and_repeatable() {
    let load = Load { is_ordered: true, mix: Mix::E, ..LOAD };
    let [one, other] = [(); 2].map(|()| measured(load, 8, 300));
    assert_eq!(one.ops_per_s, other.ops_per_s, "the same seed gives the same run");
    assert!(one.nic_ops > 20.0, "a scan reads about 50 leaves: {} ops", one.nic_ops);
}

/// As in the motivation of SMART: mail addresses of 32 bytes, and values of 64.
#[test]
fn strings_are_read_with_one_read_and_without_a_cache_with_several() {
    let strings = Load { keys: NameKind::Emails, key_padding: 10, value_len: 64, members: 1, ..LOAD };
    let [cached, apart] = [LOAD.cache_bytes, 0]
        .map(|cache_bytes| measured(Load { cache_bytes, coroutines: 1, skew: 0.0, ..strings }, 4, 400));
    println!("{cached:?}, without a cache {apart:?}");
    assert!((cached.nic_ops - 1.0).abs() < 0.05, "{} ops", cached.nic_ops);
    assert!(cached.bytes[1] > 82.0 + 32.0 + 64.0, "{:?} bytes", cached.bytes);
    assert!(apart.nic_ops > 3.0 && apart.mean_us > 3.0 * cached.mean_us, "{} ops", apart.nic_ops);
}

#[test]
fn an_unknown_index_is_refused() {
    let refused = Bed::new(Load { system: "pilaf", ..LOAD }, 1).err().expect("it is no index");
    assert!(refused.contains("no index of kind 'pilaf': name smart, art or sherman"), "{refused}");
}

/// The hottest ranks have records of their own, and each sixteenth of the records has as many draws as the same share
/// of the ranks.
#[test]
fn folded_ranks_keep_the_hottest_records_and_the_share_of_each_part() {
    const RANKS: u64 = 1 << 20;
    for records in [1 << 12, 1 << 16, RANKS] {
        let ranks = Ranks::new(RANKS, records, 0.99);
        let mut weights = vec![0.0; records as usize];
        let weight = |rank: u64| (rank as f64 + 1.0).powf(-0.99);
        (0..RANKS).for_each(|rank| weights[ranks.record(rank) as usize] += weight(rank));
        let own = (records / 32).min(256);
        let is_own = |rank: u64| (weights[rank as usize] / weight(rank) - 1.0).abs() < 1e-9;
        assert!((0..own).all(is_own), "{own} of {records} records");
        for sixteenths in 1..=16 {
            let folded: f64 = weights[..(records * sixteenths / 16) as usize].iter().sum();
            let whole: f64 = (0..RANKS * sixteenths / 16).map(weight).sum();
            assert!((folded / whole - 1.0).abs() < 1e-3, "{sixteenths} sixteenths of {records} records");
        }
    }
}
