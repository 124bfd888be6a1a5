use std::collections::{HashMap, HashSet};

use super::*;

/// A small space, whose indices are soon exhausted.
const SMALL: Space = Space { bits: 12 };

fn allocator(seed: u8) -> StagAllocator {
    StagAllocator::new([seed; 32])
}

fn issue(a: &mut StagAllocator, count: usize) -> Vec<Stag> {
    (0..count).map(|_| a.allocate().unwrap()).collect()
}

/// Returns STags that an attacker might predict after it has seen `seen` (the latest last) and has
/// released `returned` (the earliest first).
fn predictions(seen: &[Stag], returned: &[Stag]) -> HashSet<u32> {
    let mut all = HashSet::new();
    // Indices are reused in the order of their release, or in reverse order.
    let first = returned.iter().take(200);
    let last = returned.iter().rev().take(200);
    for stag in first.chain(last) {
        // With the same key, the next key, or any that a counter would soon reach.
        for step in 0..16 {
            all.insert(stag.0 & !0xFF | (stag.0 + step) & 0xFF);
        }
    }
    let [.., a, b] = seen else { return all };
    for n in 1..=200u32 {
        // Counters of the index, of the key, of both. Constant steps and differences.
        all.insert(b.0.wrapping_add(n));
        all.insert(b.0.wrapping_add(n << 8));
        all.insert(b.0.wrapping_add(n << 8 | n));
        all.insert(b.0.wrapping_add(b.0.wrapping_sub(a.0).wrapping_mul(n)));
        all.insert(b.0 ^ (a.0 ^ b.0).wrapping_mul(n));
    }
    // The STag that followed an earlier occurrence of the latest STag, if any.
    all.extend(seen.windows(2).filter(|two| two[0] == *b).map(|two| two[1].0));
    all
}

#[test]
fn seen_stags_do_not_predict_the_next() {
    let mut a = allocator(1);
    let mut seen = Vec::new();
    let mut returned = Vec::new();
    for round in 0..100 {
        // The attacker registers many regions and deregisters them, in either order.
        let mut own = issue(&mut a, 200);
        seen.extend(&own);
        if round % 2 == 0 {
            own.reverse();
        }
        for stag in own {
            a.release(stag);
            returned.push(stag);
        }
        let guesses = predictions(&seen, &returned);
        let indices: HashSet<u32> = returned.iter().map(|stag| index(*stag)).collect();
        for stag in issue(&mut a, 20) {
            assert!(!guesses.contains(&stag.0), "{stag} of another user was predicted");
            assert!(!indices.contains(&index(stag)), "{stag} has an index just released");
            a.release(stag);
        }
    }
}

/// Returns the sum of squared deviations divided by the expected count. Its mean is about the
/// number of cells, its standard deviation the square root of twice that number.
fn chi_squared(counts: &[u32]) -> f64 {
    let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
    counts.iter().map(|n| (f64::from(*n) - expected).powi(2) / expected).sum()
}

#[test]
fn stag_bits_are_uniform_and_independent() {
    const COUNT: usize = 1 << 17;
    let mut a = allocator(2);
    // Released at once, so that no value is missing for long.
    let stags: Vec<u32> = (0..COUNT)
        .map(|_| {
            let stag = a.allocate().unwrap();
            a.release(stag);
            stag.0
        })
        .collect();
    // 256 cells each: six standard deviations are 136.
    let even = |what: &str, cell: &dyn Fn(&[u32]) -> u32| {
        let mut counts = [0; 256];
        stags.windows(3).for_each(|three| counts[cell(three) as usize & 0xFF] += 1);
        let chi = chi_squared(&counts);
        assert!((119.0..391.0).contains(&chi), "{what}: {chi}");
    };
    for shift in [0, 8, 16, 24] {
        even("a byte", &|s| s[0] >> shift);
        even("the difference to the next one", &|s| s[1].wrapping_sub(s[0]) >> shift);
        even("the difference to the one after it", &|s| s[2].wrapping_sub(s[0]) >> shift);
        even("the bits that differ from the next one", &|s| (s[1] ^ s[0]) >> shift);
        even("half a byte, and half of the next one", &|s| {
            s[0] >> shift & 15 | (s[1] >> shift) << 4
        });
    }
    even("key and index", &|s| s[0] & 15 | s[0] >> 8 << 4);
}

#[test]
fn another_seed_issues_other_stags() {
    let [mut a, mut b] = [allocator(3), allocator(4)];
    let a = issue(&mut a, 1000);
    let b = issue(&mut b, 1000);
    assert!(a.iter().zip(&b).all(|(a, b)| a != b));
    assert_eq!(issue(&mut allocator(3), 1000), a, "only the seed decides");
}

#[test]
fn an_index_rests_for_rest_releases() {
    let mut a = StagAllocator::within(SMALL, [5; 32]);
    let mut returned: HashMap<u32, usize> = HashMap::new();
    let mut shortest = usize::MAX;
    for turn in 0..200_000 {
        let stag = a.allocate().unwrap();
        if let Some(before) = returned.insert(index(stag), turn) {
            // Each iteration releases one index, including the iteration that used this one.
            shortest = shortest.min(turn - before - 1);
        }
        a.release(stag);
    }
    assert_eq!(shortest, SMALL.rest());
}

/// 2^33 uses are 512 per index. A small space reaches that soon, at any fill level, and only the
/// position in the stream of random words depends on the size of the space.
#[test]
fn indices_stay_uniform_after_many_uses() {
    const USES_OF_EACH: u32 = 512;
    for fill in [0, SMALL.most() / 2, SMALL.most() - 1] {
        let mut a = StagAllocator::within(SMALL, [6; 32]);
        let held = issue(&mut a, fill as usize);
        let free = SMALL.indices() - 2 - fill;
        let mut uses = vec![0u32; SMALL.indices() as usize];
        for _ in 0..USES_OF_EACH * free {
            let stag = a.allocate().unwrap();
            uses[index(stag) as usize] += 1;
            a.release(stag);
        }
        assert!(
            held.iter().all(|stag| uses[index(*stag) as usize] == 0),
            "an index in use was issued"
        );
        let used: Vec<u32> = uses.into_iter().filter(|n| *n > 0).collect();
        assert_eq!(used.len(), free as usize, "every free index is used");
        let least = used.iter().min().unwrap();
        let most = used.iter().max().unwrap();
        // Six standard deviations of 512 are 136. Resting makes the distribution more even.
        assert!(*least > 376 && *most < 648, "{least} to {most}");
        held.iter().for_each(|stag| a.release(*stag));
        assert_eq!((a.used.len(), a.returned.len()), (0, SMALL.rest()));
    }
    // The whole space, at the stream position after 2^33 uses with eight draws each, and at the end
    // of the stream.
    for position in [1u128 << 36, (1 << 68) - 1000] {
        let mut a = allocator(6);
        a.random.set_word_pos(position);
        let stags = issue(&mut a, 10_000);
        assert_eq!(stags.iter().map(|s| index(*s)).collect::<HashSet<_>>().len(), stags.len());
        stags.iter().for_each(|stag| a.release(*stag));
    }
}

#[test]
fn at_most_half_of_the_indices_are_in_use() {
    let mut a = StagAllocator::within(SMALL, [7; 32]);
    // Fill the set of resting indices.
    for _ in 0..=SMALL.rest() {
        let stag = a.allocate().unwrap();
        a.release(stag);
    }
    let before = a.random.get_word_pos();
    let stags = issue(&mut a, SMALL.most() as usize);
    let draws = a.random.get_word_pos() - before;
    assert!(draws < 2 * u128::from(SMALL.most()), "{draws} draws for {}", stags.len());
    assert_eq!(a.allocate(), Err(StagsExhausted));
    assert_eq!(stags.iter().map(|s| index(*s)).collect::<HashSet<_>>().len(), stags.len());
    a.release(stags[0]);
    assert!(a.allocate().is_ok());
}

#[test]
fn reserved_values_are_never_issued() {
    let mut a = StagAllocator::within(SMALL, [8; 32]);
    for _ in 0..100 * SMALL.indices() {
        let stag = a.allocate().unwrap();
        assert!(index(stag) != 0 && index(stag) != SMALL.indices() - 1, "{stag}");
        a.release(stag);
    }
    assert!(!Space::WHOLE.has(index(Stag(0))) && !Space::WHOLE.has(index(Stag(u32::MAX))));
    assert!(Space::WHOLE.has(index(Stag(0x100))) && Space::WHOLE.has(index(Stag(0xFFFF_FEFF))));
}

#[test]
fn an_index_is_released_once_with_any_key() {
    let mut a = StagAllocator::within(SMALL, [9; 32]);
    let stag = a.allocate().unwrap();
    // The owner of a window has incremented the key.
    let later = Stag(stag.0 & !0xFF | stag.0.wrapping_add(9) & 0xFF);
    a.release(later);
    assert_eq!((a.used.len(), a.returned.len()), (0, 1));
    // An STag that is not in use cannot be released: resting, never issued, or not an index.
    for stag in [stag, later, Stag(0), Stag(u32::MAX), Stag(7 << 8)] {
        a.release(stag);
        assert_eq!((a.used.len(), a.returned.len()), (0, 1), "{stag}");
    }
}
