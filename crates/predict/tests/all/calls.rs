//! Tests of the predictions of calls and READs on machines that are nodes and clients at once.

use farside_predict::calls::{Bed, Headers, Load, Measured, Requests};
use farside_sim::fabric::hardware::peers::Doorbells;
use farside_sim::hardware::{CIB, CX3, Cluster, Inputs};

const CALLS: Requests = Requests::Calls(Headers::Paper);
const READS: Requests = Requests::Reads(1);

fn measured(load: Load) -> Measured {
    let measured = Bed::new(load, 1).and_then(|bed| bed.measure(1_000)).expect("nothing fails");
    println!("{:.2} M/s, {measured:?}", mops(&measured));
    measured
}

fn mops(measured: &Measured) -> f64 {
    measured.ops_per_s / 1e6
}

/// A single task on a machine, and another machine that serves it.
const fn alone(cluster: Cluster, requests: Requests) -> Load {
    Load { issuing: 1, threads: 1, tasks: 1, ..Load::paper(cluster, 2, requests) }
}

#[test]
fn a_request_alone_takes_the_time_of_its_steps() {
    let Inputs { verb_ns, pcie_ns, two_sided_ns, core_message_ns, .. } = CIB.inputs;
    let read = verb_ns + pcie_ns + CIB.core_verb_ns + CIB.doorbell_ns;
    let call = verb_ns + two_sided_ns + core_message_ns;
    for (requests, ns) in [(READS, read), (Requests::Reads(3), 3 * read), (CALLS, call)] {
        let alone = measured(alone(CIB, requests));
        // The rest is the time of the NICs, links and PCIe.
        let over = alone.mean_us - ns as f64 / 1e3;
        assert!(
            (0.0..0.25).contains(&over),
            "{} us, of which {ns} ns are those of the inputs",
            alone.mean_us
        );
        assert_eq!((alone.doorbells, alone.misses), (1.0, 0.0));
    }
}

/// PCIe limits calls, and the unit that starts ops limits READs.
#[test]
fn calls_and_reads_of_32_bytes_have_the_published_rates_on_cib() {
    let calls = measured(Load::paper(CIB, 11, CALLS));
    assert!((mops(&calls) / 40.9 - 1.0).abs() <= 0.1, "{} M/s", mops(&calls));
    assert!(calls.busy.pcie > 0.95 && calls.busy.unit < 0.9, "{:?}", calls.busy);
    let reads = measured(Load::paper(CIB, 11, READS));
    assert!((mops(&reads) / 50.0 - 1.0).abs() <= 0.1, "{} M/s", mops(&reads));
    assert!(reads.busy.unit > 0.95 && reads.busy.pcie < 0.5, "{:?}", reads.busy);
    assert_eq!([calls.misses, reads.misses], [0.0; 2], "14 and 140 connections are cached");
}

/// With 128 connections, half of the uses of a random one miss a cache of 64.
#[test]
fn reads_lose_speed_where_the_nic_does_not_cache_all_connections_and_calls_do_not() {
    let load = Load { issuing: 5, ..Load::paper(CX3, 5, READS) };
    let [few, many] = [1, 4].map(|connections| measured(Load { connections, ..load }));
    assert_eq!(few.misses, 0.0, "32 connections");
    assert!((many.misses / 2.0 - 0.5).abs() < 0.05, "{} misses of two uses", many.misses);
    let (ends, misses) = (2.0 * 38.462, many.misses * 150.0);
    let slower = mops(&few) / mops(&many);
    assert!((slower / ((ends + misses) / ends) - 1.0).abs() < 0.05, "{slower} times");
    let [few, many] = [1, 4].map(|connections| measured(Load { connections, requests: CALLS, ..load }));
    assert!((mops(&many) / mops(&few) - 1.0).abs() < 0.01);
}

#[test]
fn a_batch_of_calls_takes_one_doorbell_and_one_for_each_machine_on_connections() {
    let load = Load { threads: 1, batch: 8, tasks: 4, ..Load::paper(CIB, 9, CALLS) };
    let [listed, single] =
        [Doorbells::ForList, Doorbells::ForEach].map(|doorbells| measured(Load { doorbells, ..load }));
    assert!((listed.doorbells - 1.0).abs() < 0.01 && (single.doorbells - 8.0).abs() < 0.01);
    assert!(listed.responses_per_doorbell > 1.5 && single.responses_per_doorbell == 1.0);
    assert!(mops(&listed) > 1.1 * mops(&single), "a core rings more often");
    let connected = measured(Load { requests: READS, ..load });
    assert!((connected.doorbells - 8.0).abs() < 0.01, "{}", connected.doorbells);
}

#[test]
fn threads_that_share_a_queue_pair_wait_for_each_other() {
    let load = Load { issuing: 1, tasks: 32, ..Load::paper(CIB, 3, READS) };
    let [private, apart, shared] = [(1, 1), (4, 1), (4, 4)]
        .map(|(threads, sharers)| mops(&measured(Load { threads, sharers, ..load })) / f64::from(threads));
    assert!((private / 10.9 - 1.0).abs() < 0.05, "{private} M/s");
    assert!((apart / private - 1.0).abs() < 0.02, "{apart} M/s by each of four threads");
    assert!(shared < 0.25 * private, "{shared} M/s");
}

/// The headers of this project have 36 bytes more in a request, and 28 in a response. The caller sends the one and
/// receives the other, and so does the node.
#[test]
fn own_headers_are_longer_than_the_papers() {
    let [paper, own] = [CALLS, Requests::Calls(Headers::Own)].map(|requests| measured(alone(CIB, requests)));
    let more = own.link_bytes - paper.link_bytes;
    assert!((more - 2.0 * (36.0 + 28.0)).abs() < 8.0, "{more} bytes");
}

#[test]
fn impossible_loads_are_refused() {
    let load = alone(CIB, CALLS);
    for (load, reason) in [
        (Load { batch: 2, ..load }, "each of the 2 requests of a batch goes to another machine"),
        (Load { threads: 15, ..load }, "more machines or threads"),
        (Load { len: 4_040, ..load }, "no requests that return 4040 bytes"),
        (Load { len: 12, ..load }, "no requests that return 12 bytes"),
    ] {
        let refused = Bed::new(load, 1).err().expect("there is no such load");
        assert!(refused.contains(reason), "{refused}");
    }
}
