//! A copy of a node's memory as plain bytes, on which `run` defines what a chain does.

use farside_fabrics::memory::Mapping;
use farside_remote::arena::{Arena, Geometry};
use farside_remote::{Key, Memory, Rights, Width};
use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::Range;

/// A copy of a node's memory, private to this test.
pub(crate) struct Twin {
    /// The key of the client under test, which may belong to its session alone.
    key: Key,
    geometry: Geometry,
    bytes: RefCell<Vec<u8>>,
}

impl Twin {
    pub(crate) fn of(memory: &Mapping, key: Key) -> Twin {
        let geometry = memory.geometry();
        let mut bytes = vec![0; geometry.size() as usize];
        let Ok(()) = memory.read(0, &mut bytes);
        Twin { key, geometry, bytes: RefCell::new(bytes) }
    }

    pub(crate) fn bytes(&self, at: u64, len: u64) -> Vec<u8> {
        self.bytes.borrow()[range(at, len as usize)].to_vec()
    }
}

fn range(at: u64, len: usize) -> Range<usize> {
    at as usize..at as usize + len
}

impl Memory for Twin {
    type Wait = Infallible;

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn admits(&self, key: Key) -> Result<Rights, Infallible> {
        Ok(if key == self.key { Rights::ALL } else { Rights::NONE })
    }

    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Infallible> {
        Arena::of(self).reach(region, at, len)
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Infallible> {
        out.copy_from_slice(&self.bytes.borrow()[range(at, out.len())]);
        Ok(())
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Infallible> {
        self.bytes.borrow_mut()[range(at, bytes.len())].copy_from_slice(bytes);
        Ok(())
    }

    fn load(&self, at: u64, width: Width) -> Result<u128, Infallible> {
        let mut word = [0; 16];
        let bytes = width.bytes() as usize;
        word[..bytes].copy_from_slice(&self.bytes.borrow()[range(at, bytes)]);
        Ok(u128::from_le_bytes(word))
    }

    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Infallible> {
        let Ok(now) = self.load(at, width);
        if now != old {
            return Ok(Err(now));
        }
        let Ok(()) = self.write(at, &new.to_le_bytes()[..width.bytes() as usize]);
        Ok(Ok(()))
    }
}
