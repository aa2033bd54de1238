"""Small well-known functions; each docstring is the request that asks for the function."""

# ruff: noqa: B905, RUF007

import datetime
import json
import math
import os
import random
import time

import requests


def add(a, b):
    """Adds two numbers."""
    return a + b


def subtract(a, b):
    """Subtracts one number from another."""
    return a - b


def multiply(a, b):
    """Multiplies two numbers."""
    return a * b


def square(x):
    """Returns the square of a number."""
    return x * x


def factorial(n):
    """Returns the factorial of a number."""
    if n <= 1:
        return 1
    return n * factorial(n - 1)


def fibonacci(n):
    """Returns the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def is_prime(n):
    """Checks whether a number is prime."""
    if n < 2:
        return False
    return all(n % i != 0 for i in range(2, int(n**0.5) + 1))


def is_even(n):
    """Checks whether a number is even."""
    return n % 2 == 0


def is_odd(n):
    """Checks whether a number is odd."""
    return n % 2 == 1


def reverse_string(text):
    """Reverses a string."""
    return text[::-1]


def is_palindrome(text):
    """Checks whether a string is a palindrome."""
    return text == text[::-1]


def count_vowels(text):
    """Counts the vowels of a string."""
    return sum(1 for char in text.lower() if char in "aeiou")


def count_words(text):
    """Counts the words of a text."""
    return len(text.split())


def find_max(numbers):
    """Returns the largest number of a list."""
    return max(numbers)


def find_min(numbers):
    """Returns the smallest number of a list."""
    return min(numbers)


def sum_list(numbers):
    """Returns the sum of a list of numbers."""
    total = 0
    for number in numbers:
        total += number
    return total


def average(numbers):
    """Returns the average of a list of numbers."""
    return sum(numbers) / len(numbers)


def median(numbers):
    """Returns the median of a list of numbers."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def remove_duplicates(items):
    """Removes the duplicates of a list."""
    return list(dict.fromkeys(items))


def flatten(lists):
    """Flattens a list of lists."""
    return [item for inner in lists for item in inner]


def reverse_list(items):
    """Reverses a list."""
    return items[::-1]


def count_items(items):
    """Counts how often each item occurs in a list."""
    counts = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def gcd(a, b):
    """Returns the greatest common divisor of two numbers."""
    while b:
        a, b = b, a % b
    return a


def lcm(a, b):
    """Returns the least common multiple of two numbers."""
    return a * b // math.gcd(a, b)


def bubble_sort(items):
    """Sorts a list with bubble sort."""
    for i in range(len(items)):
        for j in range(len(items) - i - 1):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items


def quicksort(items):
    """Sorts a list with quicksort."""
    if len(items) <= 1:
        return items
    pivot = items[0]
    smaller = [item for item in items[1:] if item < pivot]
    larger = [item for item in items[1:] if item >= pivot]
    return [*quicksort(smaller), pivot, *quicksort(larger)]


def binary_search(items, target):
    """Finds an item in a sorted list with binary search."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def merge(left, right):
    """Merges two sorted lists."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]


def read_file(path):
    """Reads a file and returns its text."""
    with open(path) as file:
        return file.read()


def read_lines(path):
    """Reads the lines of a file."""
    with open(path) as file:
        return file.read().splitlines()


def write_file(path, text):
    """Writes a text to a file."""
    with open(path, "w") as file:
        file.write(text)


def count_lines(path):
    """Counts the lines of a file."""
    with open(path) as file:
        return sum(1 for _ in file)


def load_json(path):
    """Loads a JSON file."""
    with open(path) as file:
        return json.load(file)


def save_json(path, data):
    """Saves data as a JSON file."""
    with open(path, "w") as file:
        json.dump(data, file, indent=2)


def celsius_to_fahrenheit(celsius):
    """Converts Celsius to Fahrenheit."""
    return celsius * 9 / 5 + 32


def fahrenheit_to_celsius(fahrenheit):
    """Converts Fahrenheit to Celsius."""
    return (fahrenheit - 32) * 5 / 9


def circle_area(radius):
    """Returns the area of a circle."""
    return math.pi * radius**2


def rectangle_area(width, height):
    """Returns the area of a rectangle."""
    return width * height


def absolute(x):
    """Returns the absolute value of a number."""
    return x if x >= 0 else -x


def greet(name):
    """Says hello to a person."""
    return f"Hello, {name}!"


def hello():
    """Prints hello world."""
    print("Hello, world!")


def fizzbuzz(n):
    """Prints FizzBuzz up to n."""
    for i in range(1, n + 1):
        if i % 15 == 0:
            print("FizzBuzz")
        elif i % 3 == 0:
            print("Fizz")
        elif i % 5 == 0:
            print("Buzz")
        else:
            print(i)


def even_numbers(numbers):
    """Returns the even numbers of a list."""
    return [number for number in numbers if number % 2 == 0]


def squares(numbers):
    """Returns the squares of a list of numbers."""
    return [number**2 for number in numbers]


def primes(n):
    """Returns the first n primes."""
    found = []
    candidate = 2
    while len(found) < n:
        if all(candidate % prime for prime in found):
            found.append(candidate)
        candidate += 1
    return found


def digit_sum(n):
    """Returns the sum of the digits of a number."""
    return sum(int(digit) for digit in str(n))


def is_leap_year(year):
    """Checks whether a year is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def are_anagrams(first, second):
    """Checks whether two words are anagrams."""
    return sorted(first) == sorted(second)


def capitalize_words(text):
    """Capitalizes each word of a text."""
    return " ".join(word.capitalize() for word in text.split())


def longest_word(text):
    """Returns the longest word of a text."""
    return max(text.split(), key=len)


def invert(mapping):
    """Swaps the keys and values of a dictionary."""
    return {value: key for key, value in mapping.items()}


def merge_dicts(first, second):
    """Merges two dictionaries."""
    return {**first, **second}


def sort_by_value(mapping):
    """Sorts a dictionary by value."""
    return dict(sorted(mapping.items(), key=lambda item: item[1]))


def chunks(items, size):
    """Splits a list into chunks."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def clamp(value, low, high):
    """Limits a value to a range."""
    return max(low, min(value, high))


def to_binary(n):
    """Converts a number to binary."""
    return bin(n)[2:]


def power(base, exponent):
    """Returns the power of a number."""
    return base**exponent


def transpose(matrix):
    """Transposes a matrix."""
    return [list(row) for row in zip(*matrix)]


def dot(a, b):
    """Returns the dot product of two vectors."""
    return sum(x * y for x, y in zip(a, b))


def common_items(first, second):
    """Finds the common items of two lists."""
    return [item for item in first if item in second]


def today():
    """Returns the current date as a string."""
    return datetime.date.today().isoformat()


def random_between(low, high):
    """Returns a random number between two values."""
    return random.randint(low, high)


def wait(seconds):
    """Waits some seconds."""
    time.sleep(seconds)


def list_files(folder):
    """Lists the files of a folder."""
    return [name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name))]


def download(url):
    """Downloads a web page."""
    response = requests.get(url)
    response.raise_for_status()
    return response.text


def measure(function, *args):
    """Measures how long a function takes."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def remove_spaces(text):
    """Removes the spaces of a string."""
    return text.replace(" ", "")


def last(items):
    """Returns the last item of a list."""
    return items[-1] if items else None


def is_empty(items):
    """Checks whether a list is empty."""
    return len(items) == 0


def is_sorted(items):
    """Checks whether a list is sorted."""
    return all(a <= b for a, b in zip(items, items[1:]))
