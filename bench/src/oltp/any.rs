//! Any of the benchmarks, chosen by name.

use farside_systems::txn::Txn;

use super::objects::Objects;
use super::smallbank::SmallBank;
use super::tatp::Tatp;
use super::{Added, Benchmark, Outcome, Stop};
use crate::driver::Kinds;
use crate::workload::Random;

/// One of the benchmarks. Its kinds are those of all of them.
#[derive(Clone, Debug)]
pub enum AnyBenchmark {
    /// TATP.
    Tatp(Tatp),
    /// SmallBank.
    SmallBank(SmallBank),
    /// The object store.
    Objects(Objects),
}

/// Runs an expression on whichever benchmark it is.
macro_rules! with {
    ($any:expr, $benchmark:ident => $do:expr) => {
        match $any {
            AnyBenchmark::Tatp($benchmark) => $do,
            AnyBenchmark::SmallBank($benchmark) => $do,
            AnyBenchmark::Objects($benchmark) => $do,
        }
    };
}

/// Kinds of the benchmarks before SmallBank, and before the object store.
const BEFORE_SMALLBANK: usize = Tatp::KINDS.len();
const BEFORE_OBJECTS: usize = BEFORE_SMALLBANK + SmallBank::KINDS.len();

const ALL: [&str; BEFORE_OBJECTS + Objects::KINDS.len()] = {
    let mut all = [""; BEFORE_OBJECTS + Objects::KINDS.len()];
    let mut place = 0;
    while place < all.len() {
        all[place] = if place < BEFORE_SMALLBANK {
            Tatp::KINDS[place]
        } else if place < BEFORE_OBJECTS {
            SmallBank::KINDS[place - BEFORE_SMALLBANK]
        } else {
            Objects::KINDS[place - BEFORE_OBJECTS]
        };
        place += 1;
    }
    all
};

impl AnyBenchmark {
    /// Name of the benchmark.
    pub fn name(&self) -> &'static str {
        match self {
            AnyBenchmark::Tatp(_) => "tatp",
            AnyBenchmark::SmallBank(_) => "smallbank",
            AnyBenchmark::Objects(_) => "objects",
        }
    }

    fn before(&self) -> usize {
        match self {
            AnyBenchmark::Tatp(_) => 0,
            AnyBenchmark::SmallBank(_) => BEFORE_SMALLBANK,
            AnyBenchmark::Objects(_) => BEFORE_OBJECTS,
        }
    }
}

impl Benchmark for AnyBenchmark {
    const KINDS: Kinds = &ALL;

    fn units(&self) -> u64 {
        with!(self, benchmark => benchmark.units())
    }

    fn rows_of_unit(&self) -> u64 {
        with!(self, benchmark => benchmark.rows_of_unit())
    }

    fn writes_max(&self) -> u64 {
        with!(self, benchmark => benchmark.writes_max())
    }

    fn value_len(&self) -> usize {
        with!(self, benchmark => benchmark.value_len())
    }

    fn kind(&self, random: &mut Random) -> usize {
        self.before() + with!(self, benchmark => benchmark.kind(random))
    }

    async fn load<T: Txn>(&self, txn: &mut T, unit: u64) -> Result<i64, Stop> {
        with!(self, benchmark => benchmark.load(txn, unit).await)
    }

    async fn run<T: Txn>(
        &self,
        txn: &mut T,
        random: &mut Random,
        added: &mut Added,
    ) -> Result<Outcome, Stop> {
        with!(self, benchmark => benchmark.run(txn, random, added).await)
    }

    async fn audit<T: Txn>(&self, txn: &mut T, unit: u64) -> Result<i64, Stop> {
        with!(self, benchmark => benchmark.audit(txn, unit).await)
    }
}
