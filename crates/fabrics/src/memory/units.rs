//! Atomic copies and exchanges of 16-byte units, for all processes that map the memory.
//!
//! On x86-64, an aligned 16-byte load or store by a VEX-encoded instruction is atomic on every CPU that has AVX (Intel
//! SDM volume 3, 9.1.1; AMD APM volume 2, 7.3.2). `cmpxchg16b` is atomic on all CPUs. The instructions are written in
//! assembly, for two reasons. A compiler may split or cache a plain access. Legacy SSE encodings in a program that also
//! uses AVX would take eight times as long.
//!
//! On other CPUs a library's lock-free 128-bit atomics are used. A CPU without such instructions is rejected, since a
//! lock would only exclude threads of one process.

/// Size of a unit in bytes.
pub(crate) const UNIT: usize = 16;

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::arch::asm;
    use std::arch::x86_64::__m128i;

    pub(crate) fn supported() -> Result<(), &'static str> {
        if !std::arch::is_x86_feature_detected!("avx") {
            return Err(
                "this CPU has no AVX, so 16 bytes cannot be read atomically; use a machine that has it",
            );
        }
        if !std::arch::is_x86_feature_detected!("cmpxchg16b") {
            return Err(
                "this CPU has no cmpxchg16b, so 16 bytes cannot be compared and swapped; use a machine that has it",
            );
        }
        Ok(())
    }

    /// Loads the unit at `from` atomically.
    ///
    /// # Safety
    /// `from` is 16-aligned and valid for reading 16 bytes.
    #[inline(always)]
    pub(crate) unsafe fn load(from: *const u8) -> u128 {
        let unit: __m128i;
        // SAFETY: by the caller's promise; the instruction accesses nothing else.
        unsafe {
            asm!("vmovdqa {unit}, [{from}]", from = in(reg) from, unit = out(xmm_reg) unit,
                 options(nostack, preserves_flags, readonly));
        }
        // SAFETY: both types are 16 plain bytes.
        unsafe { std::mem::transmute::<__m128i, u128>(unit) }
    }

    /// Copies units by `$load` and `$store`: eight, four or one at a time. Of these two instructions, the one that
    /// accesses shared memory requires alignment. Advances `from` and `to`, and decrements `units`.
    macro_rules! copy {
        ($from:ident, $to:ident, $units:ident, $load:literal, $store:literal) => {{
            while $units >= 8 {
                asm!(concat!($load, " {a}, [{from}]"), concat!($load, " {b}, [{from} + 16]"),
                     concat!($load, " {c}, [{from} + 32]"), concat!($load, " {d}, [{from} + 48]"),
                     concat!($load, " {e}, [{from} + 64]"), concat!($load, " {f}, [{from} + 80]"),
                     concat!($load, " {g}, [{from} + 96]"), concat!($load, " {h}, [{from} + 112]"),
                     concat!($store, " [{to}], {a}"), concat!($store, " [{to} + 16], {b}"),
                     concat!($store, " [{to} + 32], {c}"), concat!($store, " [{to} + 48], {d}"),
                     concat!($store, " [{to} + 64], {e}"), concat!($store, " [{to} + 80], {f}"),
                     concat!($store, " [{to} + 96], {g}"), concat!($store, " [{to} + 112], {h}"),
                     from = in(reg) $from, to = in(reg) $to, a = out(xmm_reg) _, b = out(xmm_reg) _,
                     c = out(xmm_reg) _, d = out(xmm_reg) _, e = out(xmm_reg) _, f = out(xmm_reg) _,
                     g = out(xmm_reg) _, h = out(xmm_reg) _, options(nostack, preserves_flags));
                ($from, $to, $units) = ($from.add(128), $to.add(128), $units - 8);
            }
            if $units >= 4 {
                asm!(concat!($load, " {a}, [{from}]"), concat!($load, " {b}, [{from} + 16]"),
                     concat!($load, " {c}, [{from} + 32]"), concat!($load, " {d}, [{from} + 48]"),
                     concat!($store, " [{to}], {a}"), concat!($store, " [{to} + 16], {b}"),
                     concat!($store, " [{to} + 32], {c}"), concat!($store, " [{to} + 48], {d}"),
                     from = in(reg) $from, to = in(reg) $to, a = out(xmm_reg) _, b = out(xmm_reg) _,
                     c = out(xmm_reg) _, d = out(xmm_reg) _, options(nostack, preserves_flags));
                ($from, $to, $units) = ($from.add(64), $to.add(64), $units - 4);
            }
            while $units > 0 {
                asm!(concat!($load, " {a}, [{from}]"), concat!($store, " [{to}], {a}"),
                     from = in(reg) $from, to = in(reg) $to, a = out(xmm_reg) _,
                     options(nostack, preserves_flags));
                ($from, $to, $units) = ($from.add(16), $to.add(16), $units - 1);
            }
        }};
    }

    /// Copies `units` units out of shared memory.
    ///
    /// # Safety
    /// `from` is 16-aligned and valid for reading `16 * units` bytes. `to` is valid for writing the same number of
    /// bytes.
    #[inline(always)]
    pub(crate) unsafe fn copy_out(mut from: *const u8, mut to: *mut u8, mut units: usize) {
        // SAFETY: by the caller's promise; each step stays within `units`.
        unsafe { copy!(from, to, units, "vmovdqa", "vmovups") }
    }

    /// Copies `units` units into shared memory.
    ///
    /// # Safety
    /// `from` is valid for reading `16 * units` bytes. `to` is 16-aligned and valid for writing the same number of
    /// bytes.
    #[inline(always)]
    pub(crate) unsafe fn copy_in(mut from: *const u8, mut to: *mut u8, mut units: usize) {
        // SAFETY: by the caller's promise; each step stays within `units`.
        unsafe { copy!(from, to, units, "vmovups", "vmovdqa") }
    }

    /// Replaces the unit at `at` by `new` if it equals `old`, atomically. Otherwise returns its value as the error.
    ///
    /// # Safety
    /// `at` is 16-aligned and valid for reading and writing 16 bytes.
    #[inline(always)]
    pub(crate) unsafe fn exchange(at: *mut u8, old: u128, new: u128) -> Result<(), u128> {
        let (low, high): (u64, u64);
        let swapped: u8;
        // SAFETY: by the caller's promise. rbx, which the compiler reserves, is restored. The other registers are named
        // so that none of them can be rbx.
        unsafe {
            asm!("xchg rsi, rbx", "lock cmpxchg16b [rdi]", "mov rbx, rsi", "sete r8b",
                 in("rdi") at, inout("rsi") new as u64 => _, in("rcx") (new >> 64) as u64,
                 inout("rax") old as u64 => low, inout("rdx") (old >> 64) as u64 => high,
                 out("r8b") swapped, options(nostack));
        }
        if swapped != 0 { Ok(()) } else { Err(u128::from(low) | u128::from(high) << 64) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use portable_atomic::{AtomicU128, Ordering};

    pub(crate) fn supported() -> Result<(), &'static str> {
        match AtomicU128::is_lock_free() && cfg!(target_endian = "little") {
            true => Ok(()),
            false => Err("this CPU cannot compare and swap 16 bytes without a lock; use a machine that can"),
        }
    }

    /// Returns the unit at `at` as an atomic variable.
    ///
    /// # Safety
    /// `at` is 16-aligned and valid for reading and writing 16 bytes, as long as the reference is used.
    unsafe fn unit<'a>(at: *const u8) -> &'a AtomicU128 {
        // SAFETY: by the caller's promise; every access to node memory is atomic.
        unsafe { AtomicU128::from_ptr(at.cast_mut().cast()) }
    }

    /// Loads the unit at `from` atomically.
    ///
    /// # Safety
    /// `from` is 16-aligned and valid for reading 16 bytes.
    pub(crate) unsafe fn load(from: *const u8) -> u128 {
        // SAFETY: by the caller's promise.
        unsafe { unit(from) }.load(Ordering::SeqCst)
    }

    /// Copies `units` units out of shared memory.
    ///
    /// # Safety
    /// `from` is 16-aligned and valid for reading `16 * units` bytes. `to` is valid for writing the same number of
    /// bytes.
    pub(crate) unsafe fn copy_out(from: *const u8, to: *mut u8, units: usize) {
        for i in 0..units {
            // SAFETY: by the caller's promise.
            unsafe {
                to.add(16 * i)
                    .cast::<[u8; 16]>()
                    .write_unaligned(unit(from.add(16 * i)).load(Ordering::Acquire).to_le_bytes())
            }
        }
    }

    /// Copies `units` units into shared memory.
    ///
    /// # Safety
    /// `from` is valid for reading `16 * units` bytes. `to` is 16-aligned and valid for writing the same number of
    /// bytes.
    pub(crate) unsafe fn copy_in(from: *const u8, to: *mut u8, units: usize) {
        for i in 0..units {
            // SAFETY: by the caller's promise.
            unsafe {
                unit(to.add(16 * i)).store(
                    u128::from_le_bytes(from.add(16 * i).cast::<[u8; 16]>().read_unaligned()),
                    Ordering::Release,
                )
            }
        }
    }

    /// Replaces the unit at `at` by `new` if it equals `old`, atomically. Otherwise returns its value as the error.
    ///
    /// # Safety
    /// `at` is 16-aligned and valid for reading and writing 16 bytes.
    pub(crate) unsafe fn exchange(at: *mut u8, old: u128, new: u128) -> Result<(), u128> {
        // SAFETY: by the caller's promise.
        unsafe { unit(at) }.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(drop)
    }
}

pub(crate) use arch::{copy_in, copy_out, exchange, load, supported};
