//! A memory that notifies an observer before each access.

use farside_fabrics::memory::Mapping;
use farside_fabrics::runner::Runs;
use farside_remote::arena::{Arena, Geometry};
use farside_remote::{Key, Memory, Rights, Width};
use std::convert::Infallible;
use std::sync::Arc;

/// Kind of an access, with the bytes or words that it writes.
pub(crate) enum Made<'a> {
    Read,
    Write(&'a [u8]),
    Exchange { old: u128, new: u128 },
}

/// Observer that is notified before each access to a memory.
pub(crate) trait Observer {
    fn before(&self, memory: &Mapping, at: u64, made: &Made<'_>);
}

/// A memory and the observer of its accesses.
pub(crate) struct Observed<H> {
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) observer: H,
}

impl<H: Observer> Observed<H> {
    fn notify(&self, at: u64, made: &Made<'_>) {
        self.observer.before(&self.mapping, at, made);
    }
}

impl<H: Observer> Runs for Observed<H> {
    fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

impl<H: Observer> Memory for Observed<H> {
    type Wait = Infallible;

    fn geometry(&self) -> Geometry {
        self.mapping.geometry()
    }
    fn admits(&self, key: Key) -> Result<Rights, Infallible> {
        Arena::of(self).admits(key)
    }
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Infallible> {
        Arena::of(self).reach(region, at, len)
    }
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Infallible> {
        self.notify(at, &Made::Read);
        self.mapping.read(at, out)
    }
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Infallible> {
        self.notify(at, &Made::Write(bytes));
        self.mapping.write(at, bytes)
    }
    fn load(&self, at: u64, width: Width) -> Result<u128, Infallible> {
        self.notify(at, &Made::Read);
        self.mapping.load(at, width)
    }
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Infallible> {
        self.notify(at, &Made::Exchange { old, new });
        self.mapping.exchange(at, width, old, new)
    }
}
